"""The checks of benchmarks/gpu.py: what each one runs, and what it expects."""

import json
import math
import os
import re
import shutil
import socket
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from benchmarks.training_run import (
    Ended,
    TrainingRun,
    run_all,
    run_one,
)

REPO = Path(__file__).resolve().parent.parent
SAMPLE = "data/sample"
LONGEST = 4096  # tokens: longer rows are truncated
STRATEGIES = sorted(path.stem for path in (REPO / "ds_configs").glob("*.json"))
OFFLOADED = [name for name in STRATEGIES if "offload" in name]

# Largest relative difference from fp32's loss in the first step: weights and activations have 8
# bits in bf16 and 11 in fp16. On CPU, 4e-5 and 1e-5 were measured.
FIRST_STEP = {"bf16": 2e-3, "fp16": 5e-4}
# Largest difference of the mean loss of the last steps, over the fall of fp32's; .006 in bf16.
LAST_STEPS, END = 5, 0.03
# Largest relative difference of a step's loss between two runs that compute the same in another
# order: packed or bucketed, one Adam or the other, resumed or not. On CPU a run in bf16 differed
# from one in fp32 by .02 after 25 steps with a higher learning rate.
SAME = {"bf16": 2e-2, "fp32": 1e-4}
# The same for weights in 4 bits, each of which is off by about a tenth.
IN_4_BITS = 5e-2
COMPARED_RATE = 3e-4  # the learning rate of those runs: the loss has to fall, or all would agree


@dataclass
class Finding:
    """What a check has found."""

    summary: str
    """For the table: one line, or a few."""
    figures: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    """One line each; with any, the check has failed."""


@dataclass(frozen=True)
class Place:
    """Where a check runs."""

    folder: Path
    """For its files; removed after it."""
    toy: bool
    micro_batch_tokens: int

    @property
    def log(self) -> Path:
        """The output of the check."""
        return self.folder / "log.txt"

    @property
    def method(self) -> str:
        """How processes are started: CUDA does not allow fork."""
        return "fork" if self.toy else "spawn"

    @property
    def precision(self) -> str:
        return "fp32" if self.toy else "bf16"


@dataclass(frozen=True)
class Check:
    """One row of the table."""

    name: str
    about: str
    limit_seconds: int
    work: Callable[[Place], Finding]
    alone: bool = False
    """Not beside other checks, because it measures time."""


# --------------------------------------------------------------------------------------------------
# Models, rows and configs

SHAPES = {
    "124m": {
        "model_type": "llama", "vocab_size": 32_000, "hidden_size": 768,
        "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12,
        "num_key_value_heads": 12, "tie_word_embeddings": True,
    },
    "0.5b": {  # Qwen2.5-0.5B
        "model_type": "qwen2", "vocab_size": 151_936, "hidden_size": 896,
        "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
        "num_key_value_heads": 2, "tie_word_embeddings": True,
    },
    "1.5b": {  # Qwen2.5-1.5B
        "model_type": "qwen2", "vocab_size": 151_936, "hidden_size": 1536,
        "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12,
        "num_key_value_heads": 2, "tie_word_embeddings": True,
    },
    "8b": {  # Llama-3.1-8B
        "model_type": "llama", "vocab_size": 128_256, "hidden_size": 4096,
        "intermediate_size": 14_336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "tie_word_embeddings": False,
    },
}  # fmt: skip
TOY_SHAPE = {
    "vocab_size": 384, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1,
}  # fmt: skip


def write_model(place: Place, shape: str, **changes: Any) -> Path:
    """A folder with the config.json of a shape."""
    sizes = SHAPES[shape] | (TOY_SHAPE if place.toy else {}) | changes
    folder = place.folder / f"model_{shape}_{sizes['num_hidden_layers']}"
    folder.mkdir(exist_ok=True)
    config = {**sizes, "max_position_embeddings": 8192, "bos_token_id": None}
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": 1, "pad_token_id": 0}))
    return folder


def write_ds_config(place: Place, name: str, **changes: Any) -> str:
    """A copy of a file of ds_configs/, with some top-level blocks updated, or removed by None."""
    block = json.loads((REPO / f"ds_configs/{name}.json").read_text())
    for key, values in changes.items():
        if values is None:
            del block[key]
        else:
            block[key] = block[key] | values
    file = place.folder / f"{name}_{len(list(place.folder.glob(f'{name}_*.json')))}.json"
    file.write_text(json.dumps(block))
    return str(file)


def torch_adam(name: str, value: bool = True) -> dict[str, Any]:
    """The optimizer block of a file of ds_configs/ with torch's AdamW, or with DeepSpeed's."""
    block = json.loads((REPO / f"ds_configs/{name}.json").read_text())["optimizer"]
    return {"params": block["params"] | {"torch_adam": value}}


def long_tailed(place: Place, model: Path, steps: int, step_tokens: int) -> dict[str, Any]:
    """A run config over rows of log-normal lengths: median 355 tokens, mean 500, at most 4,096;
    packed into micro-batches of the place's budget, with random weights.
    """
    from benchmarks.memory import write_rows

    rows = place.folder / "rows.jsonl"
    if not rows.exists():
        count = 200 if place.toy else max(2000, steps * step_tokens // 200)
        write_rows(rows, count, tokens=40 if place.toy else 400, most_sums=400)
    return {
        "ds_config": "ds_configs/zero1.json",
        "model": {
            "name_or_path": str(model), "from_config": True, "tokenizer": f"{SAMPLE}/model",
        },
        "data": {
            "train_sources": [str(rows)], "batching": "packed",
            "max_length": 256 if place.toy else LONGEST,
            "micro_batch_tokens": 256 if place.toy else place.micro_batch_tokens,
            "cache_dir": str(place.folder / "cache"),
        },
        "train": {
            "global_batch_tokens": 512 if place.toy else step_tokens,
            "steps": min(steps, 4) if place.toy else steps,
            "learning_rate": 1e-5, "lr_schedule": "constant", "precision": place.precision,
        },
        "tracking": {"wandb": "disabled"},
    }  # fmt: skip


def changed(config: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A copy of a run config; `a__b=value` sets the key a.b."""
    config = json.loads(json.dumps(config))
    for name, value in changes.items():
        section, _, key = name.partition("__")
        if key:
            config.setdefault(section, {})[key] = value
        else:
            config[section] = value
    return config


def problem_of(name: str, ended: Ended) -> str:
    """One line about a run that should have ended well."""
    errors = [
        line for line in ended.output.splitlines() if re.match(r"(\w+\.)*\w*[eE]rror\b", line)
    ]
    reason = (errors or [line for line in ended.tail if line.strip()] or ["no output"])[-1]
    return f"{name}: exit code {ended.code}: {reason[:300]}"


def largest_difference(losses: dict[int, float], others: dict[int, float]) -> float:
    """The largest relative difference of a step's loss; infinite if the steps are not the same."""
    if not losses or losses.keys() != others.keys():
        return math.inf
    return max(abs(losses[step] / others[step] - 1) for step in losses)


def print_tails(ended: dict[str, Ended]) -> None:
    """Write the end of each output to the log of the check."""
    for name, run in ended.items():
        print(f"--- {name}: exit code {run.code}", *run.tail, sep="\n", flush=True)


# --------------------------------------------------------------------------------------------------
# Does it run?


def check_environment(place: Place) -> Finding:
    """What the machine has; fails only where the libraries cannot be imported."""
    import deepspeed
    import psutil
    import torch
    from deepspeed.accelerator import get_accelerator

    from runtime.internals import installed_versions

    def said_by(*command: str) -> str | None:
        if shutil.which(command[0]) is None:
            return None
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        return done.stdout.strip() or done.stderr.strip()

    query = "--query-gpu=name,driver_version,memory.total,clocks.max.sm,power.limit"
    on_cuda = torch.cuda.is_available()
    versions = {
        **installed_versions(),
        "cuda": torch.version.cuda,
        "python": sys.version.split()[0],
    }
    if on_cuda:
        versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    for name in ("transformers", "accelerate", "datasets"):
        versions[name] = __import__(name).__version__
    figures = {
        "device": torch.cuda.get_device_name(0) if on_cuda else "cpu",
        "nvidia-smi": said_by("nvidia-smi", query, "--format=csv,noheader"),
        "versions": versions,
        "nvcc": (said_by("nvcc", "--version") or "").split("release ")[-1].split(",")[0] or None,
        "g++": (said_by("g++", "--version") or "").partition("\n")[0] or None,
        "accelerator": get_accelerator().device_name(),
        "bf16": torch.cuda.is_bf16_supported(including_emulation=False) if on_cuda else None,
        "ops that can be compiled": sorted(
            name for name, ok in deepspeed.ops.__compatible_ops__.items() if ok
        ),
        "cores": psutil.cpu_count(),
        "memory_gb": round(psutil.virtual_memory().total / 1e9),
        "disk_free_gb": round(shutil.disk_usage(place.folder).free / 1e9),
    }
    problems = []
    if get_accelerator().device_name() != ("cpu" if place.toy else "cuda"):
        problems = [f"DeepSpeed has chosen the accelerator {get_accelerator().device_name()}"]
    names = ("torch", "cuda", "nccl", "deepspeed", "transformers")
    parts = [f"{name} {versions[name]}" for name in names if versions.get(name)]
    return Finding(", ".join([figures["device"], *parts]), figures, problems)


def check_demo(place: Place) -> Finding:
    """recipes/demo.yaml with the deepspeed launcher on one GPU."""
    from deepspeed.launcher import runner  # what the command `deepspeed` calls

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    run = place.folder / "run"
    command = [
        "--num_gpus", "1", "--master_port", port, "train.py", "--config", "recipes/demo.yaml",
        "--output_dir", run, "--tracking.wandb", "disabled",
        "--data.cache_dir", place.folder / "cache",
    ]  # fmt: skip
    if place.toy:
        lines = (REPO / SAMPLE / "eval.jsonl").read_text().splitlines(keepends=True)
        rows = place.folder / "rows.jsonl"
        rows.write_text("".join(lines[:16]))
        command += [
            "--data.train_sources", f"[{rows}]", "--data.eval_sources", f"[{rows}]",
            "--train.steps", 8, "--train.global_batch_size", 8, "--train.warmup_examples", 0,
        ]  # fmt: skip
    try:
        runner.main([str(word) for word in command])
    except SystemExit as end:
        return Finding("", problems=[f"exit code {end.code}"])
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    before, *_, after = [line["eval_loss"] for line in lines if line["kind"] == "eval"]
    speed = statistics.median(line["tokens_per_s"] for line in lines if line["kind"] == "train")
    precision = yaml.safe_load((run / "resolved_ds_config.json").read_text())["bf16"]["enabled"]
    figures = {"loss": [before, after], "tokens_per_s": speed, "bf16": precision}
    needed = before if place.toy else before / 10
    problems = [f"the held-out loss is not below {needed:.3f}"] if after >= needed else []
    return Finding(
        f"held-out loss {before:.3f} -> {after:.3f}, {speed:,.0f} tokens/s", figures, problems
    )


def check_gpu_tests(place: Place) -> Finding:
    """The tests that need a GPU."""
    # of the machine's own plugins, any could stop pytest
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    import pytest

    # the others need packages that benchmarks/wheels.py leaves out, and minutes to be collected
    tests = [f for f in sorted(REPO.glob("tests/test_*.py")) if "mark.gpu" in f.read_text()]
    options = ["-q", "-m", "gpu", "-p", "no:cacheprovider", "-p", "pytest_timeout"]
    code = pytest.main([*options, *map(str, tests[:1] if place.toy else tests)])
    sys.stdout.flush()
    last = place.log.read_text().splitlines()[-1]
    return Finding(last, problems=[f"pytest: exit code {int(code)}"] if code else [])


# --------------------------------------------------------------------------------------------------
# Is it exact?


def check_ds_configs(place: Place) -> Finding:
    """The files of ds_configs/ without offload, in bf16 and fp16, against fp32."""
    return compare_precisions(place, {name: f"ds_configs/{name}.json" for name in STRATEGIES
                                      if name not in OFFLOADED})  # fmt: skip


def check_offload(place: Place) -> Finding:
    """Those with offload. DeepSpeed's CPU Adam is compiled first, or else torch's is used."""
    if place.toy:  # without a minute of compiling
        seconds, problem = None, None
    else:
        seconds, problem = compile_op("CPUAdamBuilder")
    files = {name: f"ds_configs/{name}.json" for name in OFFLOADED}
    if seconds is None:
        files = {name: write_ds_config(place, name, optimizer=torch_adam(name)) for name in files}
    finding = compare_precisions(place, files)
    finding.figures["cpu_adam_compile_seconds"] = seconds
    if seconds is not None:
        finding.summary += f"; CPU Adam compiled in {seconds:.0f} s"
    if problem:
        finding.problems.append(f"CPU Adam cannot be compiled, torch's was used: {problem}")
    return finding


def compile_op(builder: str) -> tuple[float | None, str | None]:
    """Compile one of DeepSpeed's ops: the seconds that it took, or what went wrong."""
    from deepspeed.ops import op_builder

    from runtime.process_group import find_ninja

    find_ninja()
    began = time.perf_counter()
    try:
        getattr(op_builder, builder)().load()
    except Exception as error:  # anything that compilers, torch and DeepSpeed raise
        traceback.print_exc()
        # ninja puts all commands and all output into one message
        lines = f"{type(error).__name__}: {error}".splitlines()
        causes = [line for line in lines if re.search(r"\berror: ", line)]
        return None, (causes or lines)[0][:300]
    return time.perf_counter() - began, None


def compare_precisions(place: Place, files: dict[str, str]) -> Finding:
    """Train the same steps of the same data from the same weights with each ds_config in bf16 and
    fp16, and compare the losses with those of ZeRO 0 in fp32.
    """
    reference, *runs = precision_runs(place, files)
    ended = run_all(
        {run.folder.name: run for run in (reference, *runs)}, place.method, 2 if place.toy else 5
    )
    print_tails(ended)
    exact = ended.pop("fp32")
    if exact.code:
        return Finding("", problems=[problem_of("fp32", exact)])
    finding = Finding("", {"fp32": sorted(exact.losses.items())})
    within: dict[str, list[float]] = {"bf16": [], "fp16": []}
    for name, run in ended.items():
        precision = name.rpartition(" ")[2]
        if refusal := expected_refusal(place, name):
            if run.code != 2 or refusal not in run.output:
                finding.problems.append(f"{name}: not refused: {problem_of(name, run)}")
            finding.figures[name] = "refused, as expected"
        elif run.code:
            finding.problems.append(problem_of(name, run))
        else:
            figures = finding.figures[name] = differences(exact, run)
            within[precision].append(figures["end"])
            if not (figures["first_step"] <= FIRST_STEP[precision] and figures["end"] <= END):
                finding.problems.append(
                    f"{name}: the loss differs from fp32 by {figures['first_step']:.1e} in the "
                    f"first step, and in the last by {figures['end']:.1%} of its fall"
                )
    finding.summary = "; ".join(
        f"{precision}: {len(ends)} ds_configs, at the end within {max(ends):.1%} of the loss's fall"
        for precision, ends in within.items() if ends
    )  # fmt: skip
    return finding


def precision_runs(place: Place, files: dict[str, str]) -> list[TrainingRun]:
    """The reference, and each ds_config in bf16 and in fp16."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    lines = (REPO / SAMPLE / "train.jsonl").read_text().splitlines(keepends=True)
    rows, model = place.folder / "rows.jsonl", place.folder / "model"
    rows.write_text("".join(lines[: 40 if place.toy else 2000]))
    architecture = AutoConfig.from_pretrained(REPO / SAMPLE / "model")
    if place.toy:
        architecture.update(TOY_SHAPE | {"head_dim": 16})
    torch.manual_seed(0)  # saved, because at stage 3 other random weights would be drawn
    AutoModelForCausalLM.from_config(architecture).save_pretrained(model)
    config = {
        "model": {"name_or_path": str(model), "tokenizer": f"{SAMPLE}/model"},
        "data": {
            "train_sources": [str(rows)], "max_length": 256, "micro_batch_tokens": 768,
            "batching": "bucketed", "cache_dir": str(place.folder / "cache"),
        },
        "train": {
            "global_batch_size": 4 if place.toy else 16, "steps": 4 if place.toy else 60,
            "learning_rate": 1e-3, "warmup_examples": 160, "lr_schedule": "constant_with_warmup",
        },
        "tracking": {"wandb": "disabled"},
    }  # fmt: skip

    def run(name: str, file: str, precision: str) -> TrainingRun:
        changes = {"ds_config": file, "train__precision": precision}
        return TrainingRun(place.folder / name, changed(config, **changes))

    return [run("fp32", "ds_configs/zero0.json", "fp32")] + [
        run(f"{name} {precision}", file, precision)
        for name, file in files.items() for precision in ("bf16", "fp16")
    ]  # fmt: skip


def expected_refusal(place: Place, name: str) -> str | None:
    """Part of the message with which a run is refused, if it should be."""
    if not name.endswith("fp16"):
        return None
    if name.startswith("zero0 "):
        return "fp16 at zero_optimization.stage 0"
    return "fp16 is enabled, but not supported by the device" if place.toy else None


def differences(exact: Ended, run: Ended) -> dict[str, float]:
    """How the losses of a run differ from those in fp32: relative in the first step, and in the
    mean of the last steps over the fall of the loss in fp32. fp16 leaves out some updates while it
    searches for its loss scale; they delay the curve.
    """

    def ends(losses: dict[int, float]) -> tuple[float, float]:
        values = [losses[step] for step in sorted(losses)]
        return values[0], statistics.fmean(values[-LAST_STEPS:] if len(values) > 8 else values[-1:])

    (first, last), (its_first, its_last) = ends(exact.losses), ends(run.losses)
    skipped = sum(line["update_skipped"] for line in run.metrics if line["kind"] == "train")
    return {
        "first_step": abs(its_first / first - 1),
        "end": abs(its_last - last) / (first - last) if last < first else math.inf,
        "skipped_updates": skipped,
        "tokens_per_s": run.tokens_per_s,
    }


def check_saves(place: Place) -> Finding:
    """Asynchronous saves, kill -9 and resume: the same losses as without a kill. And for how long
    a save of either kind blocks training.
    """
    config = long_tailed(place, write_model(place, "124m"), steps=12, step_tokens=65_536)
    config = changed(
        config, ds_config="ds_configs/zero2.json", train__steps=12,
        train__learning_rate=COMPARED_RATE,
        checkpoint={"every_steps": 4, "async_save": True, "keep_last": 1},
    )  # fmt: skip
    blocking = changed(config, checkpoint__async_save=False)
    first = {
        "uninterrupted": TrainingRun(place.folder / "uninterrupted", config),
        "killed": TrainingRun(place.folder / "killed", config, kill_at_step=9),
    }
    then = {
        "blocking": TrainingRun(place.folder / "blocking", blocking),
        "resumed": TrainingRun(place.folder / "killed", config),
    }
    ended = run_all(first, place.method, at_once=2)
    shutil.rmtree(first["uninterrupted"].output_dir / "checkpoints", ignore_errors=True)  # 4 GB
    ended |= run_all(then, place.method, at_once=2)
    print_tails(ended)
    bad = [problem_of(n, e) for n, e in ended.items() if e.code != (-9 if n == "killed" else 0)]
    if "resuming from" not in ended["resumed"].output:
        bad.append("the killed run was not resumed from a checkpoint")
    if bad:
        return Finding("", problems=bad)
    difference = largest_difference(ended["uninterrupted"].losses, ended["resumed"].losses)

    def stall(run: Ended) -> float:
        saves = [line["save_seconds"] for line in run.metrics if line["kind"] == "save"]
        return statistics.median(saves[:-1])  # the last one waits until it is written

    figures = {
        "difference": difference,
        "asynchronous_stall_seconds": stall(ended["uninterrupted"]),
        "blocking_stall_seconds": stall(ended["blocking"]),
    }
    limit = 0 if place.toy else SAME[place.precision]
    exactly = "bit for bit" if difference == 0 else f"within {difference:.1e}"
    return Finding(
        f"killed and resumed: the same losses {exactly}; a save blocks for "
        f"{figures['asynchronous_stall_seconds']:.2f} s, blocking ones for "
        f"{figures['blocking_stall_seconds']:.2f} s",
        figures,
        [f"the losses differ by {difference:.1e} after the resume"] if difference > limit else [],
    )


# --------------------------------------------------------------------------------------------------
# How fast, with how much memory?


def compare_runs(
    place: Place, configs: dict[str, dict[str, Any]], same: dict[str, float]
) -> Finding:
    """Runs over the same steps, each against the first: losses, speed, memory.

    Args:
        same: for all runs but the first, the largest relative difference of a step's loss.
    """
    runs = {
        name: TrainingRun(
            place.folder / name, changed(c, train__learning_rate=COMPARED_RATE), saves=False
        )
        for name, c in configs.items()
    }
    ended = run_all(runs, place.method)
    print_tails(ended)
    if bad := [problem_of(name, run) for name, run in ended.items() if run.code]:
        return Finding("", problems=bad)
    first = ended[next(iter(ended))]
    figures: dict[str, Any] = {}
    texts, problems = [], []
    for name, run in ended.items():
        figures[name] = {
            "tokens_per_s": run.tokens_per_s,
            "step_seconds": run.step_seconds,
            "peak_memory_gb": run.figures["peak_memory_gb"],
            "attention": run.figures["attention"],
        }
        texts.append(f"{name} {run.tokens_per_s:,.0f} tokens/s")
        if run is not first:
            difference = largest_difference(first.losses, run.losses)
            figures[name]["difference"] = difference
            ratio = run.tokens_per_s / first.tokens_per_s
            texts[-1] += f" ({ratio:.2f} times), losses within {difference:.1e}"
            if difference > same[name]:
                problems.append(f"the losses of {name} differ by {difference:.1e}")
    return Finding("; ".join(texts), figures, problems)


def check_packed(place: Place) -> Finding:
    """Packed against bucketed, with the default budget."""
    config = long_tailed(place, write_model(place, "124m"), steps=16, step_tokens=131_072)
    if not place.toy:
        config = changed(config, data__micro_batch_tokens=16_384)
    finding = compare_runs(
        place,
        {kind: changed(config, data__batching=kind) for kind in ("bucketed", "packed")},
        {"packed": SAME[place.precision]},
    )
    if not finding.problems:
        finding.summary += f"; packed with {finding.figures['packed']['attention']}"
    return finding


def check_fused_adam(place: Place) -> Finding:
    """DeepSpeed's FusedAdam, compiled with nvcc, against torch's AdamW."""
    seconds = None
    if not place.toy:
        seconds, problem = compile_op("FusedAdamBuilder")
        if problem:
            return Finding("", problems=[f"FusedAdam cannot be compiled: {problem}"])
    config = long_tailed(place, write_model(place, "124m"), steps=16, step_tokens=65_536)
    # at toy size torch's AdamW takes its place, which is not compiled
    file = write_ds_config(place, "zero1", optimizer=torch_adam("zero1", value=place.toy))
    configs = {"AdamW": config, "FusedAdam": changed(config, ds_config=file)}
    finding = compare_runs(place, configs, {"FusedAdam": SAME[place.precision]})
    finding.figures["compile_seconds"] = seconds
    if seconds is not None:
        finding.summary += f"; compiled in {seconds:.0f} s"
    return finding


def check_lora(place: Place) -> Finding:
    """LoRA under ZeRO 1 and 3, with recomputed activations, and QLoRA, from the same weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = write_model(place, "124m")
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    model.to(torch.bfloat16).save_pretrained(folder)
    config = long_tailed(place, folder, steps=16, step_tokens=65_536)
    config = changed(
        config, model__from_config=False, model__lora={"r": 16, "alpha": 32},
        model__activation_checkpointing=True,
    )  # fmt: skip
    configs = {f"ZeRO {n}": changed(config, ds_config=f"ds_configs/zero{n}.json") for n in (1, 3)}
    if not place.toy:
        configs["QLoRA"] = changed(config, model__quantization="nf4")
    same = {"ZeRO 3": SAME[place.precision], "QLoRA": IN_4_BITS}
    finding = compare_runs(place, configs, same)
    memory = ", ".join(
        f"{name} {values['peak_memory_gb']:.1f} GB" for name, values in finding.figures.items()
    )
    more = "QLoRA not run: it needs a GPU" if place.toy else f"peak memory {memory}"
    return replace(finding, summary=f"{finding.summary}; {more}")


def check_loss_memory(place: Place) -> Finding:
    """Peak memory of forward and backward through the output head and the loss, where one token in
    four is supervised and where all are: logits of all tokens, of the supervised ones alone, and of
    one chunk of them at a time.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from config.schema import ModelConfig
    from data.loader import MicroBatch
    from model.loss import SupervisedLoss

    device = torch.device("cpu" if place.toy else "cuda")
    tokens = 2048 if place.toy else 16_384
    # one small layer, so that the loss is what needs the memory
    sizes = {"num_hidden_layers": 1} | ({"vocab_size": 16_384} if place.toy else {})
    architecture = AutoConfig.from_pretrained(write_model(place, "0.5b", **sizes))
    dtype = torch.float32 if place.toy else torch.bfloat16
    model = AutoModelForCausalLM.from_config(architecture, dtype=dtype).to(device)
    ids = torch.randint(architecture.vocab_size, (1, tokens))
    mask = torch.ones_like(ids)

    def batch_of(every: int) -> MicroBatch:
        is_target = torch.arange(tokens)[None] % every == 0
        is_target[0, 0] = False
        return MicroBatch.of(ids.numpy(), is_target.numpy(), attention_mask=mask.numpy())

    def of_all_logits(batch: MicroBatch) -> torch.Tensor:
        labels = torch.full((tokens,), -100, device=device)
        labels[batch.positions + 1] = batch.targets
        out = model(input_ids=batch.input_ids, attention_mask=mask.to(device), use_cache=False,
                    labels=labels[None])  # fmt: skip
        return out.loss * len(batch.targets)

    def of_supervised(batch: MicroBatch) -> torch.Tensor:
        return selected(model, batch).cross_entropy

    losses: dict[str, Callable] = {
        "all logits": of_all_logits, "supervised": of_supervised, "chunked": of_supervised,
    }  # fmt: skip
    figures: dict[str, Any] = {}
    values: dict[str, dict[str, float]] = {}
    problems = []
    for name, loss in losses.items():
        if name == "supervised":
            selected = SupervisedLoss(model)
        if name == "chunked":
            chunk_tokens = 64 if place.toy else ModelConfig.loss_chunk_tokens
            words = range(3, architecture.vocab_size)
            if problem := selected.use_chunks(model, words, device, chunk_tokens):
                problems.append(f"whole logits: {problem}")
        for share, every in (("1/4", 4), ("all", 1)):
            value, gigabytes = peak_of(loss, batch_of(every).to(device), model)
            figures.setdefault(share, {})[name] = gigabytes
            values.setdefault(share, {})[name] = value
    for share, of_share in values.items():
        exact = of_share["all logits"]
        for name, value in of_share.items():
            if abs(value / exact - 1) > SAME[place.precision]:
                problems.append(f"{name}, {share} supervised: loss {value:.6g}, not {exact:.6g}")
    summary = "; ".join(
        f"{share} of {tokens:,} tokens supervised: "
        + ", ".join(f"{name} {gigabytes:.2f} GB" for name, gigabytes in of_share.items())
        for share, of_share in figures.items()
    )
    return Finding(summary, figures, problems)


def peak_of(loss: Callable, batch: Any, model: Any) -> tuple[float, float]:
    """The value of a loss, and how much memory its forward and backward pass need, in GB; on CPU
    that of the process, where Linux counts it.
    """
    import torch

    on_cuda = batch.input_ids.is_cuda
    if on_cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    else:
        before = peak_resident_bytes(reset=True)
    value = loss(batch)
    value.backward()
    peak = torch.cuda.max_memory_allocated() if on_cuda else peak_resident_bytes()
    model.zero_grad(set_to_none=True)
    return float(value.detach()), (peak - before) / 1e9


def peak_resident_bytes(reset: bool = False) -> int:
    """Most memory that this process has had since the last reset; 0 where Linux does not say.

    Args:
        reset: start counting again, from what it has now.
    """
    try:
        if reset:
            Path("/proc/self/clear_refs").write_text("5")  # see proc(5)
        status = Path("/proc/self/status").read_text()
    except OSError:
        return 0
    return int(re.search(r"VmHWM:\s+(\d+)", status)[1]) * 1024


@dataclass(frozen=True)
class Dense:
    """How a shape is trained on one GPU."""

    shape: str
    steps: int
    step_tokens: int
    trainer_rows: int
    """Rows per micro-batch of Trainer: as many tokens as ours on average, if they fit."""
    checkpointing: bool = False
    layers: tuple[int, ...] = ()
    """Numbers of layers to try, until one fits; default: that of the shape."""


# AdamW in bf16 needs 16 bytes per parameter: weights 2, gradients 2, fp32 weights and moments 12;
# with gradients accumulated in fp32 18. 8.03e9 parameters: 128 GB of the 150 GB of an H200. ZeRO 1
# and 2 convert all gradients to fp32 at once for the update, 32 GB more; ZeRO 3 does so for one
# sub-group at a time. Activations: 1.1 GB of checkpoints and 7 GB of logits for 4,096 tokens.
DENSE = (
    Dense("0.5b", steps=14, step_tokens=65_536, trainer_rows=8),
    Dense("1.5b", steps=9, step_tokens=65_536, trainer_rows=8),
    Dense(
        "8b", steps=5, step_tokens=65_536, trainer_rows=1, checkpointing=True, layers=(32, 24, 16)
    ),
)


def attempts(dense: Dense, with_trainer: bool) -> list[tuple[int, int | None]]:
    """(layers, Trainer's rows per micro-batch), to be tried until one fits into the memory."""
    rows = [dense.trainer_rows >> k for k in range(dense.trainer_rows.bit_length())]
    most, *fewer = dense.layers or (SHAPES[dense.shape]["num_hidden_layers"],)
    if not with_trainer:
        return [(number, None) for number in (most, *fewer)]
    return [(most, number) for number in rows] + [(number, 1) for number in fewer]


def check_dense(dense: Dense, with_trainer: bool, place: Place) -> Finding:
    """Model TFLOP/s and peak memory of train.py, or of Trainer on the same examples."""
    tried = attempts(dense, with_trainer)
    for number, rows in tried:
        changes = {} if place.toy else {"num_hidden_layers": number}
        model = write_model(place, dense.shape, **changes)
        rows = 4 if place.toy and rows else rows
        ended = run_dense(dense, model, rows, place)
        if "out of memory" not in ended.output.lower():
            break
        print_tails({f"{number} layers, {rows} rows": ended})
    print_tails({dense.shape: ended})
    if ended.code:
        return Finding("", problems=[problem_of(dense.shape, ended)])
    from transformers import AutoConfig

    from model.architecture import count_parameters

    architecture = AutoConfig.from_pretrained(model)
    seconds = sum(step["seconds"] for step in ended.timed_steps)
    flops = sum(step["model_flops"] for step in ended.timed_steps)
    figures = {
        "layers": architecture.num_hidden_layers,
        "trainer_rows": rows,
        "parameters": count_parameters(architecture),
        "tokens_per_s": ended.tokens_per_s,
        "model_tflops": flops / seconds / 1e12,
        "matmul_tflops": ended.figures["matmul_tflops"],
        "share": flops / seconds / 1e12 / ended.figures["matmul_tflops"],
        "peak_memory_gb": ended.figures["peak_memory_gb"],
        "attention": ended.figures["attention"],
        "tokens": sum(step["tokens"] for step in ended.figures["steps"]),
    }
    what = f"{rows} rows per micro-batch: " if rows else ""
    if number != tried[0][0]:
        what += f"{number} of {tried[0][0]} layers: "
    return Finding(
        f"{what}{figures['tokens_per_s']:,.0f} tokens/s, {figures['model_tflops']:.3g} model "
        f"TFLOP/s = {figures['share']:.1%} of a product of matrices ({figures['matmul_tflops']:.3g}"
        f"), peak {figures['peak_memory_gb']:.1f} GB, {figures['attention']}",
        figures,
    )


def run_dense(dense: Dense, model: Path, rows: int | None, place: Place) -> Ended:
    config = long_tailed(place, model, dense.steps, dense.step_tokens)
    config = changed(config, model__activation_checkpointing=dense.checkpointing)
    if dense.checkpointing:  # too large for fp32 gradients
        small = {"sub_group_size": 200_000_000}
        file = write_ds_config(
            place, "zero3", zero_optimization=small, data_types=None, communication_data_type=None
        )
        config = changed(config, ds_config=file)
    run = TrainingRun(
        place.folder / f"run_{model.name}_{rows}", config, trainer_rows=rows, saves=False,
        environment={"PYTORCH_ALLOC_CONF": "expandable_segments:True"},
    )  # fmt: skip
    return run_one(run, place.method)


def dense_checks(shape: str, limit_seconds: int) -> Iterable[Check]:
    dense = next(d for d in DENSE if d.shape == shape)
    for name, with_trainer in ((f"dense_{shape}", False), (f"trainer_{shape}", True)):
        about = "transformers' Trainer on the same rows" if with_trainer else "train.py, packed"
        work = partial(check_dense, dense, with_trainer)
        yield Check(name, f"{shape}: {about}", limit_seconds, work, alone=True)


CHECKS = (
    Check("environment", "versions and compilers", 120, check_environment),
    Check("demo", "recipes/demo.yaml with the deepspeed launcher", 240, check_demo),
    Check(
        "ds_configs", "each without offload in bf16 and fp16, against fp32", 240, check_ds_configs
    ),
    Check("gpu_tests", "pytest -m gpu", 180, check_gpu_tests),
    Check("offload", "each with offload in bf16 and fp16, against fp32", 300, check_offload),
    Check("loss_memory", "peak memory of the loss", 60, check_loss_memory),
    Check("lora", "LoRA under ZeRO 1 and 3, QLoRA", 240, check_lora, alone=True),
    *dense_checks("0.5b", 180),
    Check("packed", "packed against bucketed", 180, check_packed, alone=True),
    Check("saves", "asynchronous saves, kill -9, resume", 240, check_saves, alone=True),
    *dense_checks("8b", 300),
    *dense_checks("1.5b", 240),
    Check("fused_adam", "FusedAdam against AdamW", 240, check_fused_adam, alone=True),
)
"""In order of value. The limits are for what hangs; --minutes ends everything else."""
