"""Measure one GPU and check that everything runs on it.

    python -m benchmarks.gpu [--out FOLDER] [--minutes N] [--only NAME ...] [--toy]

Runs the CHECKS below, the most important ones first. Each check has processes of its own. A check
that fails does not stop the others. After each check, FOLDER/results.json has the figures and
FOLDER/results.md is a page with the card, the versions, each figure beside its goal and a published
run, the cause of each failure, the checks not run yet, and a block to paste into an issue.

With --minutes, a check starts only if its limit fits into what is left, and ends at its limit.
Checks that passed before are not repeated, so the same command continues. It needs about 20 GB of
disk and no network. --toy runs every check at toy size on CPU, to test this file; its figures mean
nothing.

Exit code: 0 if all requested checks passed, 1 if not, 2 without a GPU. A missed goal still passes.
"""

import argparse
import gzip
import json
import math
import os
import re
import string
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from zerotrain.checkpoint.run_folder import METRICS, PROFILE_NOW, checkpoint_name
from zerotrain.config.parse import parse_command_line
from zerotrain.runtime.errors import UserError, exit_on_error
from zerotrain.runtime.machine import GIB, Machine
from zerotrain.tools.local_ranks import run_local_ranks
from zerotrain.tools.records import read_metrics

REPO = Path(__file__).resolve().parent.parent
TOKENIZER = REPO / "data" / "sample" / "model"
PUBLISHED = json.loads((REPO / "recipes" / "shapes.json").read_text())
LLAMA_8B = PUBLISHED["meta-llama/Llama-3.1-8B"]
QWEN_1_5B = PUBLISHED["Qwen/Qwen2.5-1.5B"]
IS_SMALL = torch.cuda.is_available() and torch.cuda.mem_get_info()[1] < 100 * GIB
LONG = 12_288 if IS_SMALL else 16_384
"""Tokens of a micro-batch that fit at 1.5B without recomputation, with 80 or 141 GB."""
SHAPES = {
    "small": PUBLISHED["Qwen/Qwen3-0.6B"] | {"num_hidden_layers": 4, "vocab_size": 8192},
    "1.5b": QWEN_1_5B,
    "1.5b_2_layers": QWEN_1_5B | {"num_hidden_layers": 2},
    "8b": LLAMA_8B,
    # At 18 bytes per weight, all 32 layers would not fit.
    "8b_part": LLAMA_8B | {"num_hidden_layers": 8 if IS_SMALL else 16},
    "experts": PUBLISHED["Qwen/Qwen3-30B-A3B"] | {"num_hidden_layers": 4},
    "hybrid": PUBLISHED["Qwen/Qwen3.5-4B"] | {"num_hidden_layers": 4},
}  # fmt: skip
TOY_SHAPE = {
    "vocab_size": 384, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "num_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32, "full_attention_interval": 2,
}  # fmt: skip
WITH_WEIGHTS = "small"
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
SAVED_AT = 5  # The step from which the check `resume` resumes.
LOSS_TOLERANCE = 0.02  # relative
RECOMPUTED = "activations recomputed"
GOALS = {"H200": 510, "H100": 445}
"""Least good model TFLOP/s by card, where all weights of 1.5B parameters or more are trained and
nothing is recomputed.
"""
OVER_TRAINER = 1.15  # least good ratio of tokens/s
RATES = {
    "1.5b": "386 TFLOP/s: MPT of 1.3B, 2,048 tokens, one of 8 H100 (llm-foundry)",
    "8b_part": "343 TFLOP/s: Llama 3.1 8B, 8,192 tokens, compiled, one of 8 H100 (torchtitan)",
    "8b_lora": "12,473 tokens/s: Llama 3 8B, one H100 (NeMo Automodel)",
}
"""Published rates beside checks whose names begin so, from published_runs.csv."""
COUNTED = """Model TFLOP/s count 6 per weight and token, and causal attention as half of all pairs.
Published rates follow from tokens/s in the same way, but with the output head at all tokens.
Here only supervised tokens have logits.
"""
FAILED = "FAILED"
"""Name of the entry that says why a check has failed."""
ERROR = re.compile(r"^(error|E |ERROR|FAILED|\d+ failed)|^(\w+\.)*\w*(Error|Exception)\b")
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

    def command(self, *words: object, until: Callable[[], bool] = lambda: False) -> str:
        """Run `python WORDS` and return its output. The command and its children are killed as
        soon as `until` returns True.

        Raises:
            CheckFailed: the command failed or ran out of time.
        """
        seconds = self.end - time.monotonic()
        log = Path(tempfile.mkdtemp(dir=self.folder)) / "log.txt"
        ended = run_local_ranks(1, words, log, until, seconds)
        if ended.code:
            raise CheckFailed(f"{words[0]}, exit code {ended.code}:\n{ended.output[-3000:]}")
        if time.monotonic() > self.end:
            raise CheckFailed("out of time")
        return ended.output

    def size(self, value: int, toy_value: int) -> int:
        return toy_value if self.toy else value

    def model(self, shape: str, max_length: int) -> Path:
        """Return a folder with the config.json of a shape. The small shape also gets weights:
        the random weights of ZeRO 3 differ from those that the other stages draw.
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
        self, shape: str = "small", tokens: int = 2048, stage: int | str = 1, **settings: object
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
            "data.train_sources": [str(self.rows(tokens, self.size(2000, 200)))],
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
        run, peak, fits = estimated(command)
        if not fits:
            note = RECOMPUTED
            command = [*command, "--model.activation_checkpointing=true"]
            _, peak, _ = estimated(command)

        def has_run() -> bool:
            return (run / METRICS).is_file() and len(read_metrics(run)) >= STEPS

        self.command(*command, until=has_run)
        return read_metrics(run)[:STEPS], {"estimated_gib": peak / GIB, "note": note}

    def train_side_by_side(self, commands: list[list[object]]) -> list[Future]:
        """Return what `train` returns or raises for each command. A run has two cores."""
        with ThreadPoolExecutor(max(1, len(os.sched_getaffinity(0)) // 2)) as pool:
            return [pool.submit(self.train, command) for command in commands]

    def compare(self, runs: dict[str, dict[str, Any]]) -> dict[str, Figures]:
        """Return the figures of some runs, by name, or the causes of their failures. The check has
        also failed if their losses differ.

        Args:
            runs: the arguments of `command_of` for each run.
        """
        commands = [self.command_of(**options) for options in runs.values()]
        found, losses, failures = {}, [], []
        for name, trained in zip(runs, self.train_side_by_side(commands), strict=True):
            try:
                steps, more = trained.result()
            except CheckFailed as problem:
                found[name] = {"note": str(problem)}
                failures.append(name or "train.py")
            else:
                found[name] = self.figures_of(steps) | more
                losses.append([step["loss"] for step in steps])
        if not np.allclose(losses, losses[:1], rtol=LOSS_TOLERANCE, atol=0):
            failures.append("the losses differ")
        return found | ({FAILED: {"note": ", ".join(failures)}} if failures else {})

    def figures_of(self, steps: list[dict[str, Any]]) -> Figures:
        """Return the rates after the warm-up. Their time includes what happens between steps."""
        timed = steps[WARM_UP_STEPS:]
        seconds = steps[-1]["time"] - steps[WARM_UP_STEPS - 1]["time"]
        figures = {
            "tokens_per_s": sum(step["tokens"] for step in timed) / seconds,
            "tokens_per_s_of_median_step": float(
                np.median([step["tokens"] / step["step_seconds"] for step in timed])
            ),
        }
        figures |= {
            key: float(np.median([step[key] for step in timed]))
            for key in steps[0]
            if key.endswith("_seconds")
        }
        if "model_flops_per_s" in steps[0]:
            flops = sum(step["model_flops_per_s"] * step["step_seconds"] for step in timed)
            rate = flops / seconds / 1e12
            figures |= {"model_tflops_per_s": rate, "loss": steps[-1]["loss"]}
        if "memory_peak_gib" in steps[-1]:
            figures["peak_memory_gib"] = steps[-1]["memory_peak_gib"]
        return figures


def estimated(command: list[object]) -> tuple[Path, float, bool]:
    """Return the folder of a run of train.py on one GPU, the estimated bytes that it needs, and
    whether the GPU has them.
    """
    # Imported here: without a GPU, DeepSpeed's import prints a warning above the error.
    from zerotrain.tools.memory import USED_SHARE, estimate_memory
    from zerotrain.training.setup import open_run

    config = parse_command_line([str(word) for word in command[1:]]).config
    on_gpu = torch.cuda.is_available()
    machine = Machine(1, 1, "cuda" if on_gpu else "cpu", "bf16")
    peak = estimate_memory(open_run(config, machine)[0]).peak
    fits = not on_gpu or peak <= USED_SHARE * torch.cuda.mem_get_info()[1]
    return Path(config.output_dir), peak, fits


# --------------------------------------------------------------------------------------------------
# The checks


def environment(bench: Bench) -> dict[str, Figures]:
    """Measure the rate of a bf16 product of two 8,192 x 8,192 matrices; note the versions."""
    rate = float(bench.command("-c", MATMUL).splitlines()[-1])
    device = "CPU"
    if not bench.toy:
        device = torch.cuda.get_device_name()
        device += f" of {torch.cuda.mem_get_info()[1] / GIB:.1f} GiB"
    packages = [f"{name} {version(name)}" for name in ("deepspeed", "transformers")]
    note = ", ".join([device, f"torch {torch.__version__}", *packages])
    return {"": {"matmul_tflops_per_s": rate, "note": note}}


def resume(bench: Bench) -> dict[str, Figures]:
    """Run twice, and once from the second run's checkpoint: do losses and norms repeat?"""
    folder = bench.folder / "saved"
    checkpoint = folder / "checkpoints" / checkpoint_name(SAVED_AT)
    saving = {"output_dir": folder, "checkpoint.every_steps": SAVED_AT}
    runs = bench.train_side_by_side([bench.command_of(), bench.command_of(**saving)])
    runs += bench.train_side_by_side([bench.command_of(**{"checkpoint.resume": checkpoint})])
    steps = [run.result()[0] for run in runs]
    first, again, resumed = [[(step["loss"], step["grad_norm"]) for step in run] for run in steps]
    pairs = (first, again), (first[SAVED_AT:], resumed)
    differ = [sum(a != b for a, b in zip(*pair, strict=False)) for pair in pairs]
    note = f"not bit for bit in {differ[0]} of {STEPS} steps of the same run, "
    note += f"{differ[1]} of {STEPS - SAVED_AT} resumed"
    return {"": {"note": note}}


def tests(bench: Bench) -> dict[str, Figures]:
    """Run pytest -m gpu: the varlen kernel, NCCL, and loss and gradients against fp32 on a CPU."""
    options = "-q -n 0 -m gpu -rfP --show-capture stdout"
    lines = bench.command("-m", "pytest", *options.split(), "tests").splitlines()
    errors = [line for line in lines if line.startswith("{")] or ["{}"]
    return {"": {"note": lines[-1]}, **json.loads(errors[0])}


def measured(shape: str, tokens: int = LONG, **options: Any) -> dict[str, dict[str, Any]]:
    """Return a check of one run with micro-batches of `tokens` tokens."""
    return {"": {"shape": shape, "tokens": tokens, **options}}


def profile(bench: Bench, **settings: object) -> dict[str, Figures]:
    """List the kernels that take most of a step, from the trace of train.py's profiler."""
    folder = Path(tempfile.mkdtemp(dir=bench.folder))
    (folder / PROFILE_NOW).touch()
    # The trace of steps 3 to 5 is written after the fifth step.
    steps, _ = bench.train(bench.command_of("1.5b", LONG, output_dir=folder, **settings))
    [trace] = (folder / "profile").glob("*.gz")
    events = pd.DataFrame(json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"])
    kernels = events[events.cat == ("cpu_op" if bench.toy else "kernel")]
    if kernels.empty:
        raise CheckFailed("error: PyTorch's profiler saw no kernels")
    spent = kernels.groupby("name").dur.sum()
    shares = (spent / spent.sum()).nlargest(12)
    parts = [f"{share:.1%} {name}" for name, share in shares.items()]
    launches = len(kernels) / sum(step["micro_steps"] for step in steps[2:5])
    figures = {**bench.figures_of(steps), "kernels_per_micro_step": launches}
    return {"": {**figures, "note": "\n".join(parts[::-1])}}  # The page shows the last line.


def against_trainer(bench: Bench, compiled: bool = False) -> dict[str, Figures]:
    """Measure Trainer without padding, then train.py, on the same rows, model and ds_config, both
    compiled or not. On a GPU Trainer has Liger and a varlen kernel.
    """
    tokens = bench.size(LONG, 256)
    # As many rows as fill 8 micro-batches of Trainer, which have the same number of rows.
    rows_of_batch = 8 * int(tokens / bench.size(MEAN_LENGTH - 10, 60))
    settings = {
        "data.train_sources": [str(bench.rows(tokens, STEPS * rows_of_batch))],
        "train.global_batch_tokens": "null",
        "train.global_batch_size": rows_of_batch,
        "model.compile": compiled,
    }
    command = bench.command_of("1.5b", LONG, **settings)
    run, *_ = estimated(command)
    theirs = [*command[1:], f"--data.micro_batch_tokens={int(1.03 * tokens)}"]
    for _ in range(1 + compiled):  # the second time from inductor's cache
        bench.command("-m", "benchmarks.trainer", *theirs)
    steps, more = bench.train(command)
    report = json.loads(run.with_suffix(".json").read_text())
    their_steps = report.pop("steps")
    work = [sum(step["tokens"] for step in side) for side in (steps, their_steps)]
    work.append(sum(step["micro_steps"] for step in steps))
    if work[0] != work[1] or report["micro_steps"] > work[2] / 0.9:
        raise CheckFailed(f"other tokens, or smaller micro-batches of Trainer: {work}, {report}")
    ours, theirs = bench.figures_of(steps) | more, bench.figures_of(their_steps) | report
    theirs["train_py_over_this"] = ours["tokens_per_s"] / theirs["tokens_per_s"]
    return {"train.py": ours, "Trainer": theirs}


COMPILED = {"model.compile": True}
LORA = {"model.lora.r": 16}
STAGES = (*range(4), "2_offload", "3_offload")  # Offload compiles CPU Adam, which needs g++.
CHECKS: dict[str, tuple[float, Callable[[Bench], dict[str, Figures]] | dict[str, dict]]] = {
    "environment": (1, environment),  # runs in every call
    "tests": (1.5, tests),
    "1.5b": (1.5, measured("1.5b")),
    # Compiled blocks of the timed runs come from inductor's cache.
    "compile_ahead": (1.5, measured("1.5b_2_layers", **COMPILED)),
    "1.5b_compiled": (1.5, measured("1.5b", **COMPILED)),
    "profile": (1, profile),
    "against_trainer": (2, against_trainer),
    "against_trainer_compiled": (3, partial(against_trainer, compiled=True)),
    "small": (2, {
        **{f"zero{n}": {"stage": n} for n in STAGES},
        "bucketed": {"data.batching": "bucketed"},
        "compiled": COMPILED,
    }),
    "lora": (1, {f"zero{n}": {"stage": n, **LORA} for n in (1, 3)}),
    "nf4": (1, {"": {"model.quantization": "nf4", **LORA}}),
    "hybrid": (1.5, {"": {"shape": "hybrid"}}),
    "experts": (1.5, measured("experts")),
    "resume": (1.5, resume),
    "8b_lora_zero3": (1.5, measured("8b", LONG // 2, stage=3, **LORA)),
    "8b_part_zero3": (1.5, measured("8b_part", LONG // 2, stage=3)),
    "profile_compiled": (1.5, partial(profile, **COMPILED)),
}  # fmt: skip
"""Limit in minutes of each check, and its function, or the arguments of Bench.compare."""


def rows_of(results: dict[str, Any]) -> Iterator[list[str]]:
    """Yield check and run, figures, goal and a published rate, for each run but the first."""
    card = results["environment"].get("", {"note": "", "matmul_tflops_per_s": math.inf})
    goal = next((goal for name, goal in GOALS.items() if name in card["note"]), 0)
    for name, result in results.items():
        published = next((text for key, text in RATES.items() if name.startswith(key)), "")
        for run, figures in result.items():
            lines = figures.get("note", "").splitlines()
            notes = [line for line in lines if ERROR.search(line)][-2:] or lines[-1:]
            value, least, unit = figures.get("model_tflops_per_s"), 0, "TFLOP/s"
            if value:
                figures = figures | {"share_of_matmul": value / card["matmul_tflops_per_s"]}
                if name.startswith(("1.5b", "8b_part")) and notes != [RECOMPUTED]:
                    least = goal
            if "train_py_over_this" in figures:
                value, least, unit = figures["train_py_over_this"], OVER_TRAINER, "times"
            yield [
                ": ".join(filter(None, [name, run, "; ".join(notes)])),
                ", ".join(
                    f"{key} {float(f'{x:.4g}'):,g}"
                    for key, x in figures.items()
                    if isinstance(x, float) and not key.endswith("_seconds")
                ),
                f"{least} {unit}: {'met' if value >= least else 'MISSED'}" if least else "",
                published,
            ]


def report_page(results: dict[str, Any]) -> str:
    """Return the results as a page in Markdown."""
    rows = [["check", "figures", "goal", "published"], ["---"] * 4, *rows_of(results)]
    table = [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows]
    left = f"Not run: {', '.join(name for name in CHECKS if name not in results) or 'none'}."
    pasted = f"## To paste into an issue\n\n```json\n{json.dumps(results, indent=1)}\n```\n"
    return "\n".join(["# One GPU\n", *table, "", left, "", COUNTED, pasted])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default="gpu_results", help="folder (gpu_results)")
    parser.add_argument("--minutes", type=float, default=math.inf, help="limit of this call (none)")
    parser.add_argument("--only", nargs="+", choices=CHECKS, help="checks to run (all)")
    parser.add_argument("--toy", action="store_true", help="toy sizes on CPU, without a time limit")
    args = parser.parse_args()
    if not (args.toy or torch.cuda.is_available()):
        raise UserError(
            f"torch {torch.__version__} sees no GPU: install its build for your GPU, or try the "
            "checks at toy size on CPU with --toy"
        )
    wanted = args.only or list(CHECKS)
    file = args.out / ("toy_results.json" if args.toy else "results.json")
    page = file.with_suffix(".md")
    results = json.loads(file.read_text()) if file.is_file() else {}
    left = [name for name in wanted if FAILED in results.get(name, [FAILED])]
    if left:
        left = list(dict.fromkeys(["environment", *left]))
    args.out.mkdir(parents=True, exist_ok=True)
    os.environ |= {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled"}
    if args.toy:
        print("toy size on CPU: the figures mean nothing")
        os.environ |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    minute = math.inf if args.toy or args.minutes == math.inf else 60
    end = time.monotonic() + minute * args.minutes
    with tempfile.TemporaryDirectory(prefix="gpu_checks_") as folder:
        # A killed compilation leaves a lock, on which later ones would wait forever.
        os.environ["TORCH_EXTENSIONS_DIR"] = f"{folder}/extensions"
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(args.out.absolute() / "inductor")
        bench = Bench(Path(folder), args.toy)
        for name in left:
            minutes, check = CHECKS[name]
            bench.end = time.monotonic() + minute * minutes
            if bench.end > end:
                print(f"not enough time left for {name} ({minutes} minutes): run the command again")
                continue
            try:
                figures = check(bench) if callable(check) else bench.compare(check)
            except CheckFailed as problem:
                figures = {FAILED: {"note": str(problem)}}
            results[name] = figures
            shown = {"environment": results["environment"], name: figures}
            for row in [*rows_of(shown)][-len(figures) :]:
                print(" | ".join(filter(None, row)), flush=True)
            file.write_text(json.dumps(results, indent=1) + "\n")
            page.write_text(report_page(results))
            if FAILED in results["environment"]:
                break
    print(f"the report: {page}")
    sys.exit(any(name not in results or FAILED in results[name] for name in wanted))


if __name__ == "__main__":
    exit_on_error(main)
