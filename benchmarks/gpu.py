"""Measure one GPU and check that everything runs on it.

    python benchmarks/gpu.py --out FOLDER [--minutes 9] [--only NAME,...] [--continue] [--toy]

Runs the CHECKS below, the most important ones first, each in processes of its own. A check that
fails does not stop the others. After each one FOLDER/results.json is written again; the table at
the end has the targets beside the figures. When --minutes are over, what runs is stopped, and
--continue runs what has no result yet. Needs about 20 GB of disk and no network. --toy runs every
check at toy size on CPU, without a limit, to test this file; its figures mean nothing.

Exit code: 0 all checks that were asked for passed, 1 otherwise. A missed target is no failure.
"""

import argparse
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpu_runs import (
    MEAN_LENGTH,
    REPO,
    TOKENIZER,
    Bench,
    CheckFailed,
    Figures,
    OutOfTime,
)
from rich.console import Console
from rich.table import Table

STEPS = 10  # of a measurement
STEP_TOKENS = 65_536  # of a measurement, in micro-batches
LOSS_TOLERANCE = 0.02  # relative, of runs that train the same in other ways
COLUMNS = {  # of the table: figure, header, format
    "tokens_per_s": ("tokens/s", ",.0f"),
    "model_tflops_per_s": ("model TFLOP/s", ".3g"),
    "share_of_matmul": ("of the matmul rate", ".1%"),
    "peak_memory_gib": ("peak GiB", ".1f"),
    "model_states_gib": ("planned GiB", ".1f"),
    "train_py_over_this": ("train.py over this", ".2f"),
    "loss": ("last loss", ".3f"),
}
TARGETS = {"model_tflops_per_s": 430, "share_of_matmul": 0.65, "train_py_over_this": 1.15}
"""At least; the first two for training all weights of 1.5B and more, on an H100 or H200."""
Check = Callable[[Bench], dict[str, Figures]]


def environment(bench: Bench) -> dict[str, Figures]:
    """Versions, and the rate of a bf16 product of two 8,192 x 8,192 matrices."""
    script = """
import json, time, torch, deepspeed, transformers
cuda = torch.cuda.is_available()
size, dtype = (8192, torch.bfloat16) if cuda else (256, torch.float32)
a, b = (torch.randn(size, size, dtype=dtype, device="cuda" if cuda else "cpu") for _ in range(2))
for repeats in (3, 30):
    if cuda:
        torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(repeats):
        a @ b
    if cuda:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - began
print(json.dumps({
    "device": torch.cuda.get_device_name() if cuda else "CPU", "torch": torch.__version__,
    "cuda": torch.version.cuda, "deepspeed": deepspeed.__version__,
    "transformers": transformers.__version__,
    "tflops_per_s": 2 * size**3 * repeats / seconds / 1e12,
}))
"""
    figures = json.loads(bench.command("-c", script).splitlines()[-1])
    if figures["device"] == "CPU" and not bench.toy:
        raise CheckFailed("no GPU; --toy runs everything at toy size on CPU")
    bench.matmul_tflops_per_s = figures["tflops_per_s"]
    return {"": figures}


def tests(bench: Bench) -> dict[str, Figures]:
    """pytest -m gpu: the varlen kernel, NCCL and the loss against the CPU's."""
    files = [file for file in (REPO / "tests").glob("test_*.py") if "mark.gpu" in file.read_text()]
    output = bench.command("-m", "pytest", "-q", "-n", "0", "-m", "gpu", *files)
    return {"": {"note": output.splitlines()[-1]}}


def measured(shape: str, length: int, **options: Any) -> Check:
    """The figures of a run, beside the memory that was planned for it."""

    def check(bench: Bench) -> dict[str, Figures]:
        tokens = 1024 if bench.toy else max(2 * length, STEP_TOKENS)
        run = bench.train(shape, length, STEPS, train__global_batch_tokens=tokens, **options)
        figures = bench.figures_of(run.steps)
        figures["model_states_gib"] = run.states_gib
        figures["has_targets"] = shape != "0.5b" and "model__lora__r" not in options
        return {"": figures}

    return check


def against_trainer(bench: Bench) -> dict[str, Figures]:
    """train.py and Trainer, one after the other: the same rows, model and ds_config."""
    length = bench.fit(8192, 256)
    micro_batch_size = length // bench.fit(MEAN_LENGTH, 64)
    global_batch_size = 8 * micro_batch_size
    rows = bench.rows(length, STEPS * global_batch_size)
    run = bench.train(
        "1.5b", 8192, STEPS, data__train_sources=f"[{rows}]",
        train__global_batch_tokens=None, train__global_batch_size=global_batch_size,
    )  # fmt: skip
    ours = bench.figures_of(run.steps)
    found = {"train.py": ours}
    for batching in ("padding_free", "group_by_length"):
        out = bench.folder / f"{batching}.json"
        try:
            bench.command(
                "benchmarks/gpu_trainer.py", "--batching", batching, "--rows", rows,
                "--model", bench.model("1.5b", length), "--tokenizer", TOKENIZER,
                "--ds_config", "ds_configs/zero1.json", "--out", out,
                "--global_batch_size", global_batch_size, "--micro_batch_size", micro_batch_size,
            )  # fmt: skip
        except CheckFailed as problem:  # e.g. out of memory: the other one may be Trainer's best
            found[f"Trainer, {batching}"] = {"note": str(problem)}
            continue
        report = json.loads(out.read_text())
        steps = report.pop("steps")
        liger = "Liger" if report.pop("liger") else "Liger is not installed"
        figures = bench.figures_of(steps) | report
        figures["train_py_over_this"] = ours["tokens_per_s"] / figures["tokens_per_s"]
        name = f"Trainer, {batching}, {report['attention']}, {liger}"
        found[name] = figures | {"has_targets": True}
    if not any("train_py_over_this" in figures for figures in found.values()):
        raise CheckFailed("\n".join(f["note"] for f in found.values() if "note" in f))
    return found


def same_losses(runs: dict[str, dict[str, Any]]) -> Check:
    """Several ways to train the same: the losses of the first one, within LOSS_TOLERANCE."""

    def check(bench: Bench) -> dict[str, Figures]:
        found = {name: bench.train(**options).steps for name, options in runs.items()}
        expect_equal(found)
        return {name: bench.figures_of(steps) for name, steps in found.items()}

    return check


def resume(bench: Bench) -> dict[str, Figures]:
    """A run that is stopped after its first step and resumed, with asynchronous saves: the losses
    of one that is not.
    """
    run = bench.folder / "resumed"
    run.mkdir()
    (run / "stop").touch()  # seen after the first step
    saves = {"every_steps": 3, "async_save": True, "keep_last": 1}
    options = {"output_dir": run, **{f"checkpoint__{key}": value for key, value in saves.items()}}
    stopped = bench.train(**options)
    if len(stopped.steps) != 1:
        raise CheckFailed(f"the run was to stop after a step, not after {len(stopped.steps)}")
    expect_equal({"whole": bench.train().steps, "resumed": bench.train(**options).steps})
    return {"": {"note": "passed"}}


def expect_equal(runs: dict[str, list[Figures]]) -> None:
    """Raise CheckFailed unless the steps of all runs have the losses of the first one."""
    first, *others = ((name, [step["loss"] for step in steps]) for name, steps in runs.items())
    for name, losses in others:
        pairs = zip(first[1], losses, strict=True)
        if not all(math.isclose(a, b, rel_tol=LOSS_TOLERANCE) for a, b in pairs):
            raise CheckFailed(f"losses of {name} {losses} differ from those of {first}")


RECOMPUTE = {"model__activation_checkpointing": True}
LORA = {"model__lora__r": 16, **RECOMPUTE}
CHECKS: dict[str, Check] = {
    "environment": environment,  # in every run
    "tests": tests,
    "dense_1.5b_8k_zero1": measured("1.5b", 8192, stage=1),
    "against_trainer_1": against_trainer,
    "dense_8b_16_layers_4k_zero3": measured("8b_16_layers", 4096, stage=3, **RECOMPUTE),
    "dense_1.5b_8k_zero2": measured("1.5b", 8192, stage=2),
    "dense_1.5b_8k_zero3": measured("1.5b", 8192, stage=3),
    "dense_1.5b_32k_zero2": measured("1.5b", 32_768, stage=2, **RECOMPUTE),
    "dense_0.5b_4k_zero1": measured("0.5b", 4096, stage=1),
    "lora_8b_4k_zero3": measured("8b", 4096, stage=3, **LORA),
    "against_trainer_2": against_trainer,
    "zero_stages": same_losses({f"zero{n}": {"stage": n} for n in range(4)}),
    "batching": same_losses({name: {"data__batching": name} for name in ("packed", "bucketed")}),
    "lora": same_losses({f"zero{n}": {"stage": n, **LORA} for n in (1, 3)}),
    "resume": resume,
    "against_trainer_3": against_trainer,
    # compiles DeepSpeed's CPU Adam, which needs g++
    "offload": same_losses({f"zero{n}": {"stage": n} for n in ("1", "2_offload", "3_offload")}),
}


def table_of(results: dict[str, Any], toy: bool) -> Table:
    """A row for each run, with a mark where a target is missed."""
    title = "toy size on CPU: these figures mean nothing" if toy else None
    table = Table(title=title)
    table.add_column("run")
    for key, (header, form) in COLUMNS.items():
        target = f"\n>= {format(TARGETS[key], form)}" if key in TARGETS else ""
        table.add_column(header + target, justify="right")
    for name, result in results.items():
        if name == "environment" and result["passed"]:
            found = result["figures"][""]
            rate = f"matrix product {found['tflops_per_s']:.3g} TFLOP/s"
            names = ("torch", "cuda", "deepspeed", "transformers")
            versions = [f"{name} {found[name]}" for name in names]
            table.caption = ", ".join([found["device"], rate, *versions])
            continue
        if not result["passed"]:
            table.add_row(f"{name}: FAILED, see results.json")
            continue
        for run, figures in result["figures"].items():
            cells = []
            for key, (_, form) in COLUMNS.items():
                text = format(figures[key], form) if key in figures else ""
                if text and figures.get("has_targets") and figures[key] < TARGETS.get(key, 0):
                    text = f"missed: {text}"
                cells.append(text)
            note = figures.get("note", "").splitlines()[:1]
            table.add_row(": ".join(filter(None, [name, run, *note])), *cells)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of results.json")
    parser.add_argument(
        "--minutes", type=float, default=9, help="for all checks together, on a GPU"
    )
    parser.add_argument("--only", help=f"of {', '.join(CHECKS)}")
    parser.add_argument("--continue", action="store_true", dest="resume")
    parser.add_argument("--toy", action="store_true", help="toy sizes, on CPU")
    args = parser.parse_args()
    wanted = args.only.split(",") if args.only else list(CHECKS)
    if unknown := sorted(set(wanted) - set(CHECKS)):
        parser.error(f"--only: no check is named {unknown[0]}; there are {', '.join(CHECKS)}")
    file = args.out / "results.json"
    results = {}
    if (args.resume or args.only) and file.is_file():
        results = json.loads(file.read_text())
    left = [name for name in wanted if not (args.resume and name in results)]
    if left:
        left = list(dict.fromkeys(["environment", *left]))  # for the matmul rate of this run
    args.out.mkdir(parents=True, exist_ok=True)
    os.environ |= {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled"}
    if args.toy:
        os.environ |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with tempfile.TemporaryDirectory(prefix="gpu_checks_") as folder:
        seconds = math.inf if args.toy else 60 * args.minutes
        bench = Bench(Path(folder), args.toy, time.monotonic() + seconds)
        for name in left:
            began = time.monotonic()
            try:
                result: dict[str, Any] = {"passed": True, "figures": CHECKS[name](bench)}
            except CheckFailed as problem:
                result = {"passed": False, "problem": str(problem)}
            except OutOfTime:
                print(f"no time was left for {name}: run it again with --continue")
                break
            results[name] = {**result, "seconds": round(time.monotonic() - began, 1)}
            text = "passed" if result["passed"] else f"FAILED: {result['problem']}"
            print(f"{name}, {results[name]['seconds']} s: {text}", flush=True)
            file.write_text(json.dumps(results, indent=1) + "\n")
            if name == "environment" and not result["passed"]:
                break
    Console(width=150).print(table_of(results, args.toy))
    sys.exit(0 if all(results.get(name, {}).get("passed") for name in wanted) else 1)


if __name__ == "__main__":
    main()
