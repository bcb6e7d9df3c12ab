"""Training runs in processes of their own that measure them: train.py, and transformers' Trainer on
the same examples.
"""

import json
import math
import multiprocessing
import os
import resource
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    import torch

WARM_UP_STEPS = 2  # not part of a rate: kernels are loaded and memory is allocated
TAIL_LINES = 20


@dataclass(frozen=True)
class TrainingRun:
    """A run of train.py to be started. Everything that it writes is in `folder`."""

    folder: Path
    config: Mapping[str, Any]
    """The run config, without output_dir."""
    environment: Mapping[str, str] = field(default_factory=dict)
    kill_at_step: int | None = None
    """The process sends itself SIGKILL when it has finished this step."""
    trainer_rows: int | None = None
    """Run transformers' Trainer with so many rows per micro-batch instead of train.py."""
    saves: bool = True
    """If False, the checkpoint at the end, which train.py always writes, is left out."""

    @property
    def output_dir(self) -> Path:
        return self.folder / "run"

    @property
    def log(self) -> Path:
        return self.folder / "log.txt"


@dataclass(frozen=True)
class Ended:
    """A run that has ended."""

    code: int
    """The exit code, negative for a signal."""
    output: str
    metrics: list[dict[str, Any]]
    """The lines of metrics.jsonl."""
    figures: dict[str, Any]
    """What the process measured: `steps`, `peak_memory_gb`, `matmul_tflops` and `attention`; empty
    if it did not end by itself.
    """

    @property
    def losses(self) -> dict[int, float]:
        return {line["step"]: line["loss"] for line in self.metrics if line["kind"] == "train"}

    @property
    def tail(self) -> list[str]:
        """The last lines of the output."""
        return self.output.splitlines()[-TAIL_LINES:]

    @property
    def timed_steps(self) -> list[dict[str, float]]:
        """The steps after the warm-up; in a run of few steps, at least the last one."""
        steps = self.figures.get("steps", [])
        return steps[min(WARM_UP_STEPS, len(steps) - 1) :] if steps else []

    @property
    def tokens_per_s(self) -> float:
        """Tokens without padding."""
        steps = self.timed_steps
        seconds = sum(s["seconds"] for s in steps)
        return sum(s["tokens"] for s in steps) / seconds if seconds else math.nan

    @property
    def step_seconds(self) -> float:
        steps = self.timed_steps
        return sum(s["seconds"] for s in steps) / len(steps) if steps else math.nan


def run_all(runs: Mapping[str, TrainingRun], method: str, at_once: int = 1) -> dict[str, Ended]:
    """Run them, `at_once` of them at a time, and return how each has ended.

    Args:
        method: "spawn", or "fork" to save the time of the imports if the calling process has done
            them, which CUDA does not allow.
    """
    context = multiprocessing.get_context(method)
    ended: dict[str, Ended] = {}
    waiting, running = list(runs.items()), {}
    while waiting or running:
        while waiting and len(running) < at_once:
            name, run = waiting.pop(0)
            run.folder.mkdir(parents=True, exist_ok=True)
            process = context.Process(target=_in_child, args=(run,), name=name)
            process.start()
            running[name] = process
        wait([process.sentinel for process in running.values()])
        for name in [name for name, process in running.items() if process.exitcode is not None]:
            ended[name] = _read(runs[name], running.pop(name).exitcode)
    return ended


def run_one(run: TrainingRun, method: str) -> Ended:
    return run_all({"": run}, method)[""]


def _read(run: TrainingRun, code: int) -> Ended:
    def text(path: Path) -> str:
        return path.read_text(errors="replace") if path.is_file() else ""

    lines = text(run.output_dir / "metrics.jsonl").splitlines(keepends=True)
    metrics = [json.loads(line) for line in lines if line.endswith("\n")]  # a killed run's last
    figures = json.loads(text(run.folder / "figures.json") or "{}")
    return Ended(code, text(run.log), metrics, figures)


# --------------------------------------------------------------------------------------------------
# In the child


def _in_child(run: TrainingRun) -> None:
    log = os.open(run.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(run.environment)
    (run.folder / "figures.json").unlink(missing_ok=True)
    config_file = run.folder / "config.yaml"
    text = yaml.safe_dump({"output_dir": str(run.output_dir), **run.config})
    config_file.write_text(text)

    from runtime.errors import exit_on_error

    work = _train if run.trainer_rows is None else _train_with_trainer
    figures = exit_on_error(lambda: work(run, ["--config", str(config_file)]))
    (run.folder / "figures.json").write_text(json.dumps(figures))


def _train(run: TrainingRun, argv: list[str]) -> dict[str, Any]:
    """train.py, with a record of each step."""
    import train  # the script itself, whose functions are wrapped
    from data.check_sources import parse_with_sources
    from tracking.metrics import Metrics
    from tracking.steps import StepRecorder

    config = parse_with_sources(argv).config
    figures: dict[str, Any] = {"steps": [], "matmul_tflops": matmul_tflops()}
    finished, log = StepRecorder.finished, Metrics.log

    def record(metrics: Metrics, kind: str, values: dict[str, Any]) -> None:
        log(metrics, kind, values)
        if kind == "train":
            seconds = values["step_seconds"]
            flops = values["model_flops_per_s"] * seconds
            figures["steps"].append(step_record(seconds, values["tokens"], flops))

    def finish(recorder: StepRecorder, batch: Any, *rest: Any) -> float:
        seconds = finished(recorder, batch, *rest)
        figures["attention"] = recorder.engine.module.config._attn_implementation
        if batch.global_step + 1 == run.kill_at_step:
            os.kill(os.getpid(), signal.SIGKILL)
        return seconds

    StepRecorder.finished, Metrics.log = finish, record
    if not run.saves:
        train.save_checkpoint = lambda *_: None
    train.main(config, dry_run=False)
    return figures | {"peak_memory_gb": peak_memory_gb()}


def _train_with_trainer(run: TrainingRun, argv: list[str]) -> dict[str, Any]:
    """transformers' Trainer on the examples of all steps of the run, in its own order, with the
    same ds_config and about as many examples per step, grouped by length, padded, with SDPA.
    """
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

    from data.check_sources import parse_with_sources
    from model.flops import count_flops
    from model.load import load_model_config
    from model.trained import trained_skeleton
    from runtime.process_group import process_group
    from tracking.console import quieten_libraries
    from tracking.startup import open_plans

    figures: dict[str, Any] = {"steps": [], "matmul_tflops": matmul_tflops()}
    config, _, plan, _ = open_plans(parse_with_sources(argv).config, world_size=1)
    architecture = load_model_config(config)
    model_flops = count_flops(trained_skeleton(config.model, architecture)[0], architecture)
    steps = [plan.step(k).micro_batches for k in range(config.train.steps)]
    rows = [r for step in steps for ranks in step for of_rank in ranks for r in of_rank.tolist()]
    accumulation = max(1, round(len(rows) / len(steps) / run.trainer_rows))
    examples = [
        {"row": row, "input_ids": ids.tolist(), "labels": np.where(mask, ids, -100).tolist()}
        for row, ids, mask in zip(rows, *plan.data.fetch(np.array(rows)), strict=True)
    ]
    collated: list[list[int]] = []  # the rows of each micro-batch

    def collate(batch: list[dict]) -> "dict[str, torch.Tensor]":
        collated.append([example["row"] for example in batch])
        length = -(-max(len(e["input_ids"]) for e in batch) // 8) * 8

        def padded(name: str, filler: int) -> "torch.Tensor":
            return torch.tensor([e[name] + [filler] * (length - len(e[name])) for e in batch])

        mask = torch.tensor([[i < len(e["input_ids"]) for i in range(length)] for e in batch])
        return {
            "input_ids": padded("input_ids", 0),
            "labels": padded("labels", -100),
            "attention_mask": mask.long(),
        }

    class Record(TrainerCallback):
        began = math.nan

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.began = time.perf_counter()

        def on_step_end(self, _args: Any, state: Any, _control: Any, **__: Any) -> None:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            now, done = time.perf_counter(), (state.global_step - 1) * accumulation
            mine = [r for batch in collated[done : done + accumulation] for r in batch]
            lengths, targets = plan.data.lengths[mine], plan.data.supervised[mine].sum()
            flops = model_flops.of_examples(lengths, float(targets))
            figures["steps"].append(step_record(now - self.began, lengths.sum(), flops))
            self.began = now

    with process_group() as ranks:
        quieten_libraries(ranks.is_first)
        on_cpu = ranks.device.type == "cpu"
        args = TrainingArguments(
            str(run.output_dir), deepspeed=config.ds_config, bf16=config.train.precision == "bf16",
            per_device_train_batch_size=run.trainer_rows, gradient_accumulation_steps=accumulation,
            num_train_epochs=1, learning_rate=config.train.learning_rate, use_cpu=on_cpu,
            train_sampling_strategy="group_by_length", report_to="none", save_strategy="no",
            gradient_checkpointing=bool(config.model.activation_checkpointing), logging_steps=10**6,
            gradient_checkpointing_kwargs={"use_reentrant": False}, disable_tqdm=True,
            remove_unused_columns=False,
        )  # fmt: skip
        model = AutoModelForCausalLM.from_config(
            architecture, attn_implementation="sdpa",
            dtype=torch.bfloat16 if args.bf16 else torch.float32,
        )  # fmt: skip
        trainer = Trainer(
            model, args, train_dataset=examples, data_collator=collate, callbacks=[Record()]
        )
        trainer.train()
    return figures | {"attention": "sdpa", "peak_memory_gb": peak_memory_gb()}


# --------------------------------------------------------------------------------------------------
# Figures


def step_record(seconds: float, tokens: float, flops: float) -> dict[str, float]:
    """What a step did: its tokens without padding, and its model FLOPs (model/flops.py)."""
    return {"seconds": seconds, "tokens": float(tokens), "model_flops": flops}


def matmul_tflops() -> float:
    """TFLOP/s of a product of two matrices of random numbers: bf16 and 8192 x 8192 on CUDA; on CPU
    a small one in fp32, only so that the code runs.
    """
    import torch

    on_cuda = torch.cuda.is_available()
    size, repeats = (8192, 30) if on_cuda else (256, 3)
    options: dict[str, Any] = {"device": "cuda" if on_cuda else "cpu"}
    options["dtype"] = torch.bfloat16 if on_cuda else torch.float32
    a, b = torch.randn(size, size, **options), torch.randn(size, size, **options)

    def seconds(count: int) -> float:
        began = time.perf_counter()
        for _ in range(count):
            torch.mm(a, b)
        if on_cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - began

    seconds(3)
    rate = 2 * size**3 * repeats / seconds(repeats) / 1e12
    if on_cuda:
        del a, b
        torch.cuda.empty_cache()
    return rate


def peak_memory_gb() -> float:
    """The most memory that tensors have had on the GPU so far; on CPU, that the process has had."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 1e9
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9
