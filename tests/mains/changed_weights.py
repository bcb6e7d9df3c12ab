"""train.py with a record of the steps that change weights or the state of the optimizer, for
test_guard.py.
"""

import json
from pathlib import Path

import torch
import xxhash

import train


def main(config, dry_run):
    """As train.main; each rank leaves output_dir/changed_RANK.json, the steps that change any."""
    train.MAX_SKIPPED_IN_A_ROW = 3
    take_step, changed = train.train_step, []

    def step(run, batch):
        engine, ranks = run.engine, run.ranks
        before = digest(engine)
        values = take_step(run, batch)
        if digest(engine) != before:
            changed.append(batch.global_step + 1)
        (Path(config.output_dir) / f"changed_{ranks.rank}.json").write_text(json.dumps(changed))
        return values

    train.train_step = step
    train.main(config, dry_run)


def digest(engine):
    """Of the weights of this rank, in all their forms, of the moments and of the update counts."""
    optimizer, found = engine.basic_optimizer, xxhash.xxh3_64()
    parts = [getattr(p, "ds_tensor", p) for p in engine.module.parameters()]
    parts += [p for group in optimizer.param_groups for p in group["params"]]
    parts += [v for state in optimizer.state.values() for v in state.values()]
    parts += [group["step"] for group in optimizer.param_groups if "step" in group]
    for part in parts:
        tensor = torch.as_tensor(part).detach().contiguous().reshape(-1)
        found.update(tensor.view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
