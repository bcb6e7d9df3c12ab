"""train.py under ZeRO 3 for test_lora.py. It counts the elements of partitioned parameters that a
rank holds.
"""

import json
from pathlib import Path

from torch.nn.modules.module import register_module_forward_hook

import train


def main(config, dry_run):
    """Train. Each rank writes the counts to output_dir/gathered_RANK.json."""
    counts = {"largest": 0, "in_a_pass": 0, "after_backward": 0, "after_a_step": 0}
    train_step = train.train_step

    def step(run, batch, *rest):
        engine, ranks = run.engine, run.ranks
        parameters = [p for p in engine.module.parameters() if not p.ds_persist]
        counts["largest"] = max(p.ds_numel for p in parameters)
        counts["whole"] = sum(p.ds_numel for p in parameters)

        def count(name):
            counts[name] = max(counts[name], sum(p.numel() for p in parameters))

        backward = engine.backward

        def backward_and_count(*args, **options):
            backward(*args, **options)
            count("after_backward")

        engine.backward = backward_and_count
        hook = register_module_forward_hook(lambda *_: count("in_a_pass"))
        try:
            values = train_step(run, batch, *rest)
        finally:
            hook.remove()
            engine.backward = backward
        count("after_a_step")
        file = Path(config.output_dir) / f"gathered_{ranks.rank}.json"
        file.write_text(json.dumps(counts))
        return values

    train.train_step = step
    train.main(config, dry_run)
