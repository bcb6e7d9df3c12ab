"""Measures how many elements a rank holds while a model is loaded under ZeRO 3, for
test_training.py.
"""

import gc
import json
import time
from dataclasses import replace
from pathlib import Path

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zerotrain.config.ds_config import resolve_ds_config
from zerotrain.model.load import load_model, load_model_config
from zerotrain.runtime.machine import Machine
from zerotrain.runtime.process_group import process_group


class PeakBytes(TorchDispatchMode):
    """The largest sum of bytes of the tensors that exist together. It is sampled at each operation
    on a tensor. Mapped files do not count, and garbage is collected first.
    """

    def __init__(self):
        super().__init__()
        self.peak_bytes = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.sample((args, kwargs, result))
        return result

    def sample(self, values):
        for value in tree_leaves(values):
            if isinstance(value, torch.Tensor) and value.device.type != "meta":
                storage = value.untyped_storage()
                if storage.filename is None:
                    self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        if self._now() > self.peak_bytes:
            gc.collect()
            time.sleep(0.02)  # gloo's thread keeps a buffer for a moment after sending it
            self.peak_bytes = max(self.peak_bytes, self._now())

    def _now(self):
        self._alive = {k: held for k, held in self._alive.items() if not held[0].expired()}
        return sum(nbytes for _, nbytes in self._alive.values())


def main(config, dry_run):
    """Load the model, pretrained and from its config. Each rank writes the elements it held."""
    with process_group(config.distributed.timeout_seconds) as ranks:
        gc.freeze()  # makes each collection faster
        for from_config in (False, True):
            config = replace(config, model=replace(config.model, from_config=from_config))
            model_config = load_model_config(config.model)
            config, ds_config = resolve_ds_config(config, Machine(1, 1), model_config.hidden_size)
            held = PeakBytes()
            # no operation shows a parameter that a thread has read but nothing has used
            hook = register_module_parameter_registration_hook(
                lambda *added, held=held: held.sample(added)
            )
            with held:
                model = load_model(config.model, config.train, model_config, ds_config)[0]
            hook.remove()
            sizes = [p.ds_shape.numel() for p in model.parameters()]
            measured = {
                "rank": ranks.rank,
                "from_config": from_config,
                "whole": sum(sizes),
                "largest": max(sizes),
                "kept": sum(p.numel() + p.ds_tensor.numel() for p in model.parameters()),
                "peak": held.peak_bytes // 4,
            }
            path = Path(config.output_dir).parent / f"held_{ranks.rank}_{from_config}.json"
            path.write_text(json.dumps(measured))
