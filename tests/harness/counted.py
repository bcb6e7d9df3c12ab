"""A count of what the host waits for, of copies to the device and of what stays on the CPU."""

import traceback
from collections import Counter
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

TESTS = str(Path(__file__).resolve().parents[1])
WAITS = {"_local_scalar_dense", "nonzero", "equal", "is_nonzero", "item", "unique_consecutive"}
"""Operators that return a value of a tensor to Python, or depend on one."""


class Counted(TorchDispatchMode):
    """Counts operators by the place in the code: waits by its function, the others by its line."""

    def __init__(self):
        super().__init__()
        self.waits, self.copies, self.on_cpu = Counter(), Counter(), Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        devices = [
            {t.device.type for t in tree_leaves(values) if isinstance(t, torch.Tensor)}
            for values in (args, result)
        ]
        if name in WAITS:
            self.wait()
        elif devices == [{"cpu"}, {"cuda"}]:
            self.copies[f"{place().filename}:{place().lineno}"] += 1
        elif devices[1] == {"cpu"}:
            self.on_cpu[f"{name} {place().filename}:{place().lineno}"] += 1
        return result

    def wait(self, *_):
        self.waits[place().name] += 1


def place():
    """The innermost line outside of torch and the tests."""
    stack = traceback.extract_stack()
    outside = [s for s in stack if "/torch/" not in s.filename and TESTS not in s.filename]
    return (outside or stack)[-1]
