"""Measure one GPU and check that everything runs on it.

    python -m benchmarks.gpu --out FOLDER [--minutes 9] [--only NAME ...] [--toy]

Runs the CHECKS below, the most important ones first. Each check has processes of its own and a
limit in minutes. A check that fails does not stop the others. FOLDER/results.json is written after
each check. The lines at the end show where a figure misses its target.

A check starts only if its limit fits into what is left of --minutes. Checks that passed before are
not repeated, so the same command continues. It needs about 20 GB of disk and no network. --toy runs
every check at toy size on CPU, to test this file; its figures mean nothing.

Exit code: 0 if all requested checks passed, 1 otherwise. A missed target still passes.
"""

import argparse
import gzip
import json
import math
import os
import string
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from zerotrain.checkpoint.run_folder import METRICS, PROFILE_NOW
from zerotrain.config.parse import parse_command_line
from zerotrain.runtime.machine import GIB, Machine
from zerotrain.tools.local_ranks import run_local_ranks
from zerotrain.tools.memory import USED_SHARE, estimate_memory
from zerotrain.tools.records import read_metrics
from zerotrain.training.setup import open_run

REPO = Path(__file__).resolve().parent.parent
TOKENIZER = REPO / "data" / "sample" / "model"
PUBLISHED = json.loads((REPO / "recipes" / "shapes.json").read_text())
LLAMA_8B = PUBLISHED["meta-llama/Llama-3.1-8B"]
SHAPES = {
    "0.6b": PUBLISHED["Qwen/Qwen3-0.6B"],
    "1.5b": PUBLISHED["Qwen/Qwen2.5-1.5B"],
    "8b": LLAMA_8B,
    # With all 32 layers, 18 bytes per weight would exceed a GPU of 141 GB.
    "8b_16_layers": LLAMA_8B | {"num_hidden_layers": 16},
    "experts": PUBLISHED["Qwen/Qwen3-30B-A3B"] | {"num_hidden_layers": 4},
}  # fmt: skip
TOY_SHAPE = {
    "vocab_size": 384, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "num_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32,
}  # fmt: skip
WITH_WEIGHTS = "0.6b"
SAVE_WEIGHTS = """
import sys, torch
from transformers import AutoConfig, AutoModelForCausalLM
config = AutoConfig.from_pretrained(sys.argv[1])
torch.manual_seed(0)
AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(sys.argv[1])
"""
MATMUL = """
import torch
from torch.utils.benchmark import Timer
cuda = torch.cuda.is_available()
size, dtype = (8192, torch.bfloat16) if cuda else (256, torch.float32)
a, b = (torch.randn(size, size, dtype=dtype, device="cuda" if cuda else "cpu") for _ in range(2))
timer = Timer("a @ b", globals={"a": a, "b": b}, num_threads=torch.get_num_threads())
timer.timeit(3)
print(2 * size**3 / timer.timeit(30).mean / 1e12)
"""
MEAN_LENGTH = 500  # tokens of a row
WARM_UP_STEPS = 3
STEPS = 8  # Every run is killed after as many steps.
LOSS_TOLERANCE = 0.02  # relative
TARGETS = {"model_tflops_per_s": 430, "share_of_matmul": 0.65, "train_py_over_this": 1.15}
"""Smallest good value of a figure on an H100 or H200."""
WITH_TARGETS = ("1.5b", "8b_16_layers", "against_trainer")
"""First part of the names of checks that have targets: all weights of 1.5B parameters or more are
trained.
"""
FAILED = "FAILED"
"""Name of the entry that says why a check has failed."""
Figures = dict[str, Any]


class CheckFailed(Exception):
    """A check has failed. `str(error)` says why."""


@dataclass
class Bench:
    """Folder and deadline of the running check."""

    folder: Path
    toy: bool
    end: float = math.inf
    """Value of time.monotonic() at which the check is out of time."""
    matmul_tflops_per_s: float = math.nan
    """Rate of the matrix product, measured first in the same call."""

    def command(self, *words: object, until: Callable[[], bool] = lambda: False) -> str:
        """Run `python WORDS` and return its output. The command and its children are killed as
        soon as `until` returns True.

        Raises:
            CheckFailed: the command failed or ran out of time.
        """
        seconds = self.end - time.monotonic()
        ended = run_local_ranks(1, words, self.folder / "log.txt", until, seconds)
        if ended.code:
            raise CheckFailed(f"{words[0]}, exit code {ended.code}: {ended.output[-3000:]}")
        if time.monotonic() > self.end:
            raise CheckFailed("out of time")
        return ended.output

    def size(self, value: int, toy_value: int) -> int:
        return toy_value if self.toy else value

    def model(self, shape: str, max_length: int) -> Path:
        """Return a folder with the config.json of a shape. The 0.6B shape also gets weights: the
        random weights of ZeRO 3 differ from those that the other stages draw.
        """
        folder = self.folder / f"model_{shape}_{max_length}"
        if not folder.is_dir():
            folder.mkdir()
            sizes = SHAPES[shape] | (TOY_SHAPE if self.toy else {})
            config = sizes | {"max_position_embeddings": max_length, "eos_token_id": 1}
            (folder / "config.json").write_text(json.dumps(config))
            if shape == WITH_WEIGHTS:
                self.command("-c", SAVE_WEIGHTS, folder)
        return folder

    def rows(self, max_length: int, count: int) -> Path:
        """Write rows of random letters and return the file. Lengths are log-normal: a few are 20
        times the mean. The first half of a row is its prompt.
        """
        file = self.folder / f"rows_{max_length}_{count}.jsonl"
        spread = 1.12
        mean = math.log(self.size(MEAN_LENGTH, 60)) - spread**2 / 2
        rng = np.random.default_rng(0)
        lengths = np.clip(rng.lognormal(mean, spread, count), 8, max_length - 2).astype(int)
        letters = list(string.ascii_lowercase)  # one token each
        with file.open("w") as out:
            for length in lengths:
                text = "".join(rng.choice(letters, length - 1))
                row = {"prompt": text[: length // 2], "completion": text[length // 2 :]}
                out.write(json.dumps(row) + "\n")
        return file

    def command_of(
        self, shape: str = "0.6b", tokens: int = 4096, stage: int | str = 1, **settings: object
    ) -> list[object]:
        """Return the command of a run of train.py.

        Args:
            tokens: length of the longest row and size of a micro-batch; a step has four times as
                many tokens.
            stage: the run uses ds_configs/zeroSTAGE.json.
            settings: dotted keys of the run config, and their values.
        """
        tokens = self.size(tokens, 256)
        settings = {
            "output_dir": tempfile.mkdtemp(dir=self.folder),
            "ds_config": f"ds_configs/zero{stage}.json",
            "model.name_or_path": self.model(shape, tokens),
            "model.from_config": shape != WITH_WEIGHTS,
            "model.tokenizer": TOKENIZER,
            "data.train_sources": [str(self.rows(tokens, self.size(4000, 200)))],
            "data.max_length": tokens,
            "data.micro_batch_tokens": tokens,
            "data.cache_dir": self.folder / "cache",
            "train.global_batch_tokens": 4 * tokens,
            "train.steps": 10_000,
            "train.precision": "fp32" if self.toy else "bf16",
            **settings,
        }
        file = self.folder / "config.yaml"
        file.write_text("tracking: {wandb: disabled}\ntrain: {learning_rate: 1e-4}\n")
        flags = [f"--{key}={value}" for key, value in settings.items()]
        return ["train.py", "--config", file, *flags]

    def train(self, command: list[object]) -> tuple[list[dict[str, Any]], Figures]:
        """Run train.py for STEPS steps, then kill it, because it would save at its end. Activations
        are recomputed only if the run would not fit without, by the estimate.

        Returns:
            The records of the steps, and the estimated memory with a note.
        """
        note = "nothing recomputed"
        run, peak = estimated(command)
        if torch.cuda.is_available() and peak > USED_SHARE * torch.cuda.mem_get_info()[1]:
            note = "activations recomputed"
            command = [*command, "--model.activation_checkpointing=true"]
            _, peak = estimated(command)

        def has_run() -> bool:
            return (run / METRICS).is_file() and len(read_metrics(run)) >= STEPS

        self.command(*command, until=has_run)
        return read_metrics(run)[:STEPS], {"estimated_gib": peak / GIB, "note": note}

    def compare(self, runs: dict[str, dict[str, Any]]) -> dict[str, Figures]:
        """Return the figures of some runs, by name.

        Args:
            runs: the arguments of `command_of` for each run.

        Raises:
            CheckFailed: a run's losses differ from the first run's.
        """
        found = {name: self.train(self.command_of(**options)) for name, options in runs.items()}
        losses = {name: [step["loss"] for step in steps] for name, (steps, _) in found.items()}
        every = list(losses.values())
        if not np.allclose(every, every[0], rtol=LOSS_TOLERANCE, atol=0):
            raise CheckFailed(f"the losses differ: {losses}")
        return {name: self.figures_of(steps) | more for name, (steps, more) in found.items()}

    def figures_of(self, steps: list[dict[str, Any]]) -> Figures:
        """Return the rates after the warm-up. Their time includes what happens between steps."""
        timed = steps[WARM_UP_STEPS:]
        seconds = steps[-1]["time"] - steps[WARM_UP_STEPS - 1]["time"]
        figures = {"tokens_per_s": sum(step["tokens"] for step in timed) / seconds}
        if "model_flops_per_s" in steps[0]:
            flops = sum(step["model_flops_per_s"] * step["step_seconds"] for step in timed)
            rate = flops / seconds / 1e12
            figures |= {"model_tflops_per_s": rate, "loss": steps[-1]["loss"]}
            figures["share_of_matmul"] = rate / self.matmul_tflops_per_s
        if "memory_peak_gib" in steps[-1]:
            figures["peak_memory_gib"] = steps[-1]["memory_peak_gib"]
        return figures


def estimated(command: list[object]) -> tuple[Path, float]:
    """Return the folder of a run of train.py on one GPU, and the estimated bytes that it needs."""
    config = parse_command_line([str(word) for word in command[1:]]).config
    machine = Machine(1, 1, "cuda" if torch.cuda.is_available() else "cpu", "bf16")
    return Path(config.output_dir), estimate_memory(open_run(config, machine)[0]).peak


# --------------------------------------------------------------------------------------------------
# The checks


def environment(bench: Bench) -> dict[str, Figures]:
    """Measure the rate of a bf16 product of two 8,192 x 8,192 matrices; note the versions."""
    if not (bench.toy or torch.cuda.is_available()):
        raise CheckFailed("no GPU; --toy runs everything at toy size on CPU")
    bench.matmul_tflops_per_s = float(bench.command("-c", MATMUL).splitlines()[-1])
    device = "CPU" if bench.toy else torch.cuda.get_device_name()
    packages = ("torch", "deepspeed", "transformers")
    note = ", ".join([device, *(f"{name} {version(name)}" for name in packages)])
    return {"": {"model_tflops_per_s": bench.matmul_tflops_per_s, "note": note}}


def tests(bench: Bench) -> dict[str, Figures]:
    """Run pytest -m gpu: the varlen kernel, NCCL, and the loss against the CPU's."""
    output = bench.command("-m", "pytest", "-q", "-n", "0", "-m", "gpu", "tests")
    return {"": {"note": output.splitlines()[-1]}}


def measured(shape: str, tokens: int, **options: Any) -> dict[str, dict[str, Any]]:
    """Return a check of one run with micro-batches of `tokens` tokens."""
    return {"": {"shape": shape, "tokens": tokens, **options}}


def profile(bench: Bench) -> dict[str, Figures]:
    """List the kernels that take most of a step, from the trace of train.py's profiler."""
    folder = bench.folder / "profiled"
    folder.mkdir(exist_ok=True)
    (folder / PROFILE_NOW).touch()
    # The trace is written after the fifth step.
    steps, _ = bench.train(bench.command_of("1.5b", 16_384, output_dir=folder))
    [trace] = (folder / "profile").glob("*.gz")
    kind = "cpu_op" if bench.toy else "kernel"
    events = pd.DataFrame(json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"])
    spent = events[events.cat == kind].groupby("name").dur.sum()
    shares = (spent / spent.sum()).nlargest(12)
    parts = [f"{share:.1%} {name}" for name, share in shares.items()]
    return {"": {**bench.figures_of(steps), "note": "\n".join(["a profile", *parts])}}


def against_trainer(bench: Bench) -> dict[str, Figures]:
    """Measure train.py, then Trainer without padding, on the same rows, model and ds_config.
    Trainer uses the attention of train.py, and Liger where that is installed.
    """
    tokens = bench.size(16_384, 256)
    rows_of_batch = 8 * tokens // bench.size(MEAN_LENGTH, 64)
    rows = bench.rows(tokens, STEPS * rows_of_batch)
    batch = {"train.global_batch_tokens": "null", "train.global_batch_size": rows_of_batch}
    command = bench.command_of("1.5b", 16_384, **{"data.train_sources": [str(rows)], **batch})
    run, _ = estimated(command)
    steps, _ = bench.train(command)
    bench.command("-m", "benchmarks.trainer", *command[1:])
    report = json.loads(run.with_suffix(".json").read_text())
    their_steps = report.pop("steps")
    work = [sum(step["tokens"] for step in side) for side in (steps, their_steps)]
    if len(steps) != len(their_steps) or work[0] != work[1]:
        raise CheckFailed(f"train.py and Trainer trained on different numbers of tokens: {work}")
    ours, theirs = bench.figures_of(steps), bench.figures_of(their_steps) | report
    theirs["train_py_over_this"] = ours["tokens_per_s"] / theirs["tokens_per_s"]
    liger = "Liger" if report["liger"] else "without Liger"
    return {"train.py": ours, f"Trainer, {report['attention']}, {liger}": theirs}


COMPILED = {"model.compile": True}
LORA = {"model.lora.r": 16}
CHECKS: dict[str, tuple[float, Callable[[Bench], dict[str, Figures]] | dict[str, dict]]] = {
    "environment": (1, environment),  # runs in every call
    "tests": (5, tests),
    "1.5b_32k": (2, measured("1.5b", 32_768)),
    "1.5b_32k_compiled": (3, measured("1.5b", 32_768, **COMPILED)),
    "1.5b_16k": (2, measured("1.5b", 16_384)),
    "1.5b_16k_compiled": (3, measured("1.5b", 16_384, **COMPILED)),
    "profile": (2, profile),
    "against_trainer_1": (5, against_trainer),
    "8b_16_layers_16k_zero3": (3, measured("8b_16_layers", 16_384, stage=3)),
    "8b_16_layers_16k_zero3_compiled": (4, measured("8b_16_layers", 16_384, stage=3, **COMPILED)),
    "experts_16k": (3, measured("experts", 16_384)),
    "8b_16k_lora_zero3": (3, measured("8b", 16_384, stage=3, **LORA)),
    "against_trainer_2": (5, against_trainer),
    "zero_stages": (4, {f"zero{n}": {"stage": n} for n in range(4)}),
    "batching": (2, {n: {"data.batching": n} for n in ("packed", "bucketed")}),
    "lora": (2, {f"zero{n}": {"stage": n, **LORA} for n in (1, 3)}),
    "against_trainer_3": (5, against_trainer),
    # It compiles DeepSpeed's CPU Adam, which needs g++.
    "offload": (5, {n: {"stage": n} for n in ("1", "2_offload", "3_offload")}),
}
"""Limit in minutes of each check, and its function, or the arguments of Bench.compare."""


def show(results: dict[str, Any]) -> None:
    """Print a line for each run, with the targets that it misses."""
    for name, result in results.items():
        for run, figures in result.items():
            cells = []
            for key, value in figures.items():
                if isinstance(value, float):
                    target = TARGETS.get(key, 0) if name.startswith(WITH_TARGETS) else 0
                    missed = f" (missed: >= {target})" if value < target else ""
                    cells.append(f"{key} {value:,.4g}{missed}")
            note = figures.get("note", "").splitlines()[:1]
            print(": ".join(filter(None, [name, run, *note, ", ".join(cells)])))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for results.json")
    parser.add_argument("--minutes", type=float, default=9, help="limit of this call (9)")
    parser.add_argument("--only", nargs="+", choices=CHECKS, help="checks to run (all)")
    parser.add_argument("--toy", action="store_true", help="toy sizes on CPU, without a time limit")
    args = parser.parse_args()
    wanted = args.only or list(CHECKS)
    file = args.out / ("toy_results.json" if args.toy else "results.json")
    results = json.loads(file.read_text()) if file.is_file() else {}
    left = [name for name in wanted if FAILED in results.get(name, [FAILED])]
    if left:
        left = list(dict.fromkeys(["environment", *left]))
    args.out.mkdir(parents=True, exist_ok=True)
    os.environ |= {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled"}
    if args.toy:
        print("toy size on CPU: the figures mean nothing")
        os.environ |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    minute = math.inf if args.toy else 60
    end = time.monotonic() + minute * args.minutes
    with tempfile.TemporaryDirectory(prefix="gpu_checks_") as folder:
        # A killed compilation leaves a lock, on which later ones would wait forever.
        os.environ["TORCH_EXTENSIONS_DIR"] = f"{folder}/extensions"
        bench = Bench(Path(folder), args.toy)
        for name in left:
            minutes, check = CHECKS[name]
            bench.end = time.monotonic() + minute * minutes
            if bench.end > end:
                print(f"not enough time left for {name} ({minutes} minutes): run the command again")
                break
            try:
                figures = check(bench) if callable(check) else bench.compare(check)
            except CheckFailed as problem:
                figures = {FAILED: {"note": str(problem)}}
            results[name] = figures
            show({name: figures})
            file.write_text(json.dumps(results, indent=1) + "\n")
            if FAILED in results["environment"]:
                break
    show(results)
    sys.exit(any(name not in results or FAILED in results[name] for name in wanted))


if __name__ == "__main__":
    main()
