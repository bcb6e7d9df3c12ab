"""train.py with a count of what the host waits for in its sixth step, for test_waits.py: calls of
synchronize, and values of tensors that are handed to Python.
"""

import json
from pathlib import Path

import torch
from deepspeed.accelerator import get_accelerator
from harness.counted import Counted

import train


def main(config, dry_run):
    """As train.main; leaves output_dir/waits.json."""
    take_step = train.take_step
    counted = Counted()

    def count(run, batches, progress):
        if progress.step != 5:
            return take_step(run, batches, progress)
        type(get_accelerator()).synchronize = counted.wait
        tolist = torch.Tensor.tolist  # does not go through the dispatcher on CPU
        torch.Tensor.tolist = lambda tensor: counted.wait() or tolist(tensor)
        with counted:
            progress = take_step(run, batches, progress)
        (Path(config.output_dir) / "waits.json").write_text(json.dumps(counted.waits))
        return progress

    train.take_step = count
    train.main(config, dry_run)
