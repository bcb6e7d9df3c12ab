"""train.py with a count of what the host waits for in its sixth step, for test_waits.py: calls of
synchronize, and values of tensors that are handed to Python.
"""

import json
import sys
from collections import Counter
from pathlib import Path

import torch
from deepspeed.accelerator import get_accelerator
from torch.utils._python_dispatch import TorchDispatchMode

import train

WAITS = {"_local_scalar_dense", "nonzero", "equal", "is_nonzero"}


class Waits(TorchDispatchMode):
    """Operators that return a value of a tensor to Python, by the function that calls them."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket.__name__ in WAITS:
            self.add()
        return function(*args, **(kwargs or {}))

    def add(self, *_):
        """Count the innermost frame outside of torch and this file."""
        frame = sys._getframe(1)
        while "/torch/" in frame.f_code.co_filename or frame.f_code.co_filename == __file__:
            frame = frame.f_back
        self.counts[frame.f_code.co_name] += 1


def main(config, mode):
    """As train.main; leaves output_dir/waits.json."""
    take_step = train.take_step
    waits = Waits()

    def counted(run, batches, progress):
        if progress.step != 5:
            return take_step(run, batches, progress)
        type(get_accelerator()).synchronize = waits.add
        tolist = torch.Tensor.tolist  # does not go through the dispatcher on CPU
        torch.Tensor.tolist = lambda tensor: waits.add() or tolist(tensor)
        with waits:
            progress = take_step(run, batches, progress)
        (Path(config.output_dir) / "waits.json").write_text(json.dumps(waits.counts))
        return progress

    train.take_step = counted
    train.main(config, mode)
