"""train.py for test_guard.py. It records the steps that change weights or the optimizer's state."""

import json
from pathlib import Path

import torch
import xxhash

import train


def main(config, dry_run):
    """Train. Each rank writes the numbers of these steps to output_dir/changed_RANK.json."""
    train.MAX_SKIPPED_IN_A_ROW = 3
    train_step, changed = train.train_step, []

    def step(run, batch, *rest):
        engine, ranks = run.engine, run.ranks
        before = hash_state(engine)
        values = train_step(run, batch, *rest)
        if hash_state(engine) != before:
            changed.append(batch.global_step + 1)
        (Path(config.output_dir) / f"changed_{ranks.rank}.json").write_text(json.dumps(changed))
        return values

    train.train_step = step
    train.main(config, dry_run)


def hash_state(engine):
    """A hash of this rank's weights in all their forms, moments and update counts."""
    optimizer, digest = engine.basic_optimizer, xxhash.xxh3_64()
    parts = [getattr(p, "ds_tensor", p) for p in engine.module.parameters()]
    parts += [p for group in optimizer.param_groups for p in group["params"]]
    parts += [v for state in optimizer.state.values() for v in state.values()]
    parts += [group["step"] for group in optimizer.param_groups if "step" in group]
    for part in parts:
        tensor = torch.as_tensor(part).detach().contiguous().reshape(-1)
        digest.update(tensor.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
