"""Measure the memory of two steps on CPU beside the estimate, as a row of a table.

    deepspeed --num_gpus 2 --module benchmarks.memory --config benchmarks/llama_300m/run.yaml
        [--ds_config ds_configs/zero3.json] [--section.key value ...]

The figures are GiB of rank 0. The model states are the tensors that Python objects hold after the
last backward pass. The peak is the most that torch has allocated at a time in the second step, like
torch.cuda.max_memory_allocated on a GPU. Offloaded tensors are in the same memory here, so the
estimates of GPU and CPU are added up.
"""

import gc
import json
import math
import sys
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

import train
from zerotrain.config.parse import parse_command_line
from zerotrain.config.schema import Config
from zerotrain.data.loader import load_steps
from zerotrain.runtime.errors import exit_on_error
from zerotrain.runtime.machine import GIB
from zerotrain.runtime.process_group import process_group
from zerotrain.tools.memory import estimate_memory
from zerotrain.tracking.steps import PhaseTimer
from zerotrain.training.engine import build_engine
from zerotrain.training.setup import open_data, open_run_on_all_ranks


class Watch(PhaseTimer):
    """Measures the model states after each backward pass."""

    model: torch.nn.Module
    states_bytes: int

    def mark(self, phase: str) -> None:
        super().mark(phase)
        if phase == "backward":
            self.states_bytes = held_bytes(self.model)


def main(config: Config) -> None:
    with ExitStack() as stack:
        profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        stack.enter_context(profiler)
        world = stack.enter_context(process_group(config.distributed.timeout_seconds))
        setup, tokenizer, ranks = open_run_on_all_ranks(config, world)
        setup, data = open_data(setup, tokenizer, ranks)
        plan = data.plan
        engine, loss, _ = build_engine(setup, tokenizer, plan, ranks)
        watch = Watch(ranks.device)
        watch.model = engine.module
        # train_step uses only these fields of a Training.
        run = SimpleNamespace(
            config=setup.config, plan=plan, engine=engine, loss=loss, ranks=ranks, timer=watch
        )  # fmt: skip
        batches = load_steps(plan, ranks.data_rank, 0, 2, part=ranks.sequence_part)
        train.train_step(run, next(batches), math.inf, ())
        with record_function("second step"):
            train.train_step(run, next(batches), math.inf, ())
    if ranks.is_first:
        trace = Path(config.output_dir) / "trace.json"
        trace.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(trace))
        memory = estimate_memory(setup)
        on_cpu = memory.cpu / setup.machine.local_ranks
        states = sum(memory.states.values()) - memory.states.get("buffers", 0)
        pairs = (
            (states + on_cpu, watch.states_bytes),
            (memory.peak + on_cpu, peak_bytes(json.loads(trace.read_text())["traceEvents"])),
        )
        cells = [f"{a / GIB:.2f} | {b / GIB:.2f} | {a / b:.3f}" for a, b in pairs]
        print("|", Path(config.ds_config).stem, "|", " | ".join(cells), "|")


def held_bytes(model: torch.nn.Module) -> int:
    """Return the bytes of the tensors that Python objects hold, without gathered weights."""
    parameters = list(model.parameters())
    tensors = [found for found in gc.get_objects() if isinstance(found, torch.Tensor)]
    tensors += [p.grad for p in parameters if p.grad is not None]
    storages = [t.untyped_storage() for t in tensors if t.device.type != "meta"]
    held = {storage.data_ptr(): storage.nbytes() for storage in storages}
    gathered = {p.data_ptr() for p in parameters if hasattr(p, "ds_tensor")}
    return sum(size for pointer, size in held.items() if pointer not in gathered)


def peak_bytes(events: list[dict[str, Any]]) -> int:
    """Return the most bytes that are allocated at a time from the second step on. The trace's own
    sums are a quarter too large under ZeRO 3: they miss what other threads have freed.
    """
    live = {}  # bytes by address
    total = peak = 0
    for event in sorted(events, key=lambda event: event.get("ts", 0)):
        if event.get("name") == "second step":
            peak = total
        elif event.get("name") == "[memory]":
            address = event["args"]["Addr"]
            total -= live.pop(address, 0)  # Another thread may have freed what was here.
            if event["args"]["Bytes"] > 0:
                live[address] = event["args"]["Bytes"]
                total += live[address]
                peak = max(peak, total)
    return peak


if __name__ == "__main__":
    exit_on_error(lambda: main(parse_command_line(sys.argv[1:]).config))
