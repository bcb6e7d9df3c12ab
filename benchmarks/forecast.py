"""Forecasts of scripts/plan.py beside what others have measured.

    python -m benchmarks.forecast [FILE.csv] [--fit]
    python -m benchmarks.forecast --run runs/mine [--gpu h100-80gb]

Prints a line per run of the file (default: benchmarks/published_runs.csv): tokens/s of a GPU as
measured and as forecast, their ratio, and the peak of a GPU's memory where it is published; for
runs that differ in the number of nodes alone, whether the verdict on the further nodes is right;
and the errors. --fit fits the constants of zerotrain/tools/estimate.py to the file, and prints them
and the errors of runs that were held out. --run prints the line of a run of train.py, on the GPU
that it has recorded unless --gpu names another.

Columns: sizes of the model; the GPU (a100, h100 ...) and its GB; the number of GPUs, 8 to a node;
tokens of a row, rows of a micro-batch, micro-steps; the ZeRO stage ("3 offload": to CPU memory;
FSDP's full sharding is 3); the share of layers that is recomputed (0, 1; selective: half, without
effect on the estimated memory); LoRA or compiled in `weights`; and what was measured.
"""

import argparse
import csv
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import permutations
from pathlib import Path
from typing import Literal

import numpy as np
import pandas as pd
from pydantic import TypeAdapter, ValidationError
from transformers import AutoConfig

from zerotrain.checkpoint.run_folder import RESOLVED_CONFIG, RESOLVED_DS_CONFIG
from zerotrain.config.ds_config import offload_devices, zero_stage
from zerotrain.config.parse import parse_command_line
from zerotrain.config.schema import Config, DataConfig, LoraConfig, ModelConfig, TrainConfig
from zerotrain.model.architecture import count_flops
from zerotrain.model.load import load_model_config
from zerotrain.runtime.errors import UserError, exit_on_error
from zerotrain.runtime.files import read_text
from zerotrain.runtime.machine import GIB, Machine
from zerotrain.tools.estimate import (
    WORTHWHILE,
    GpuCluster,
    Rates,
    Workload,
    find_gpu,
    step_time,
)
from zerotrain.tools.memory import estimate_memory, layer_widths
from zerotrain.tools.records import read_metrics
from zerotrain.training.setup import Architecture, Setup, resolve

PUBLISHED = Path(__file__).with_name("published_runs.csv")
NODE_GPUS = 8
KINDS = {"2": "starcoder2", "3": "llama"}  # models with so many matrices in a feed-forward block
RECOMPUTED = {"0": 0.0, "1": 1.0, "selective": 0.5}
DEEPSPEED_SLOWDOWN = 1.62  # of compute, in the runs of DeepSpeed 0.14
ASSUMED = {  # of each constant: what is likely without the table, and the spread of its logarithm
    "matmul_share": (0.75, 0.3),
    "attention_share": (0.45, 0.5),
    "head_share": (0.5, 0.5),
    "peak_exponent": (0.2, 0.7),
    "elementwise_passes": (1.0, 0.5),
    "launch_seconds": (6e-5, 0.7),
    "update_passes": (1.0, 0.5),
    "node_gb_per_s": (200.0, 0.4),
    "network_gb_per_s": (150.0, 0.5),
    "hidden_share": (0.7, 0.4),
    "collective_seconds": (2e-5, 1.0),
    "pcie_gb_per_s": (20.0, 0.4),
    "cpu_adam_per_s": (2e9, 0.5),
    "slowdown": (1.3, 0.4),
}
RUN_SPREAD = 0.05  # of the logarithm of a run's speed


@dataclass(frozen=True)
class PublishedRun:
    """A line of the table."""

    source: str
    model: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    mlp_matrices: Literal["2", "3"]
    mlp_width: int
    vocabulary: int
    tied: bool
    gpu: str
    gpu_gib: int
    gpus: int
    sequence: int
    micro_batch: int
    accumulation: int
    zero: str
    checkpointing: Literal["0", "1", "selective"]
    weights: str
    tokens_per_s_per_gpu: float
    peak_gib: float | None

    @cached_property
    def setup(self) -> Setup:
        """The run as scripts/plan.py would resolve it."""
        tokens = self.sequence * self.micro_batch
        lora = "LoRA" in self.weights
        shape = {
            "model_type": KINDS[self.mlp_matrices],
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "intermediate_size": self.mlp_width,
            "vocab_size": self.vocabulary,
            "tie_word_embeddings": self.tied,
        }
        config = Config(
            output_dir="runs/published",
            model=ModelConfig(
                self.model,
                activation_checkpointing=self.checkpointing == "1",
                compile="compiled" in self.weights,
                lora=LoraConfig() if lora else None,
            ),
            data=DataConfig(
                ["rows.jsonl"],
                max_length=self.sequence,
                batching="bucketed",
                micro_batch_tokens=tokens,
            ),
            train=TrainConfig(1e-4, global_batch_tokens=tokens * self.gpus, steps=1),
            ds_config=f"ds_configs/zero{self.zero.replace(' ', '_')}.json",
        )
        machine = Machine(self.gpus, min(self.gpus, NODE_GPUS), "cuda", "bf16")
        return resolve(config, machine, architecture(json.dumps(shape), lora))

    def is_like(self, other: "PublishedRun") -> bool:
        """Whether the two differ in their number of GPUs alone."""
        rest = {"gpus": 0, "tokens_per_s_per_gpu": 0, "peak_gib": None}
        return replace(self, **rest) == replace(other, **rest)

    def tokens_per_s(self, rates: Rates) -> float:
        """The forecast for a GPU; an array if the rates are arrays."""
        local = self.setup.machine.local_ranks
        if "DeepSpeed" not in self.source:
            rates = replace(rates, slowdown=1)
        cluster = GpuCluster(
            nodes=self.gpus // local,
            gpus=local,
            gpu=find_gpu(f"{self.gpu}-{self.gpu_gib}gb"),
            rates=rates,
        )
        tokens = self.sequence * self.micro_batch * self.accumulation * self.gpus
        workload = Workload(
            config=self.setup.config,
            architecture=self.setup.architecture,
            tokens=tokens,
            supervised=tokens,
            pairs=tokens * (self.sequence + 1) / 2,
            recomputed=RECOMPUTED[self.checkpointing],
            steps=1,
        )
        return tokens / step_time(self.setup, workload, self.accumulation, cluster)[1] / self.gpus


@cache
def architecture(shape: str, lora: bool) -> Architecture:
    """The model of a config.json on the meta device."""
    config = AutoConfig.for_model(**json.loads(shape))
    return Architecture.of(ModelConfig("published", lora=LoraConfig() if lora else None), config)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", nargs="?", default=str(PUBLISHED))
    parser.add_argument("--fit", action="store_true")
    parser.add_argument("--run", type=Path, help="output_dir of a run")
    parser.add_argument("--gpu", help="in place of the one that the run has recorded")
    args = parser.parse_args()
    runs = [own_run(args.run, args.gpu)] if args.run else read_runs(args.file)
    if args.run:
        print(pd.DataFrame(runs).to_csv(index=False))
    show_fit(runs) if args.fit else show_forecasts(runs)


def own_run(folder: Path, gpu: str | None) -> PublishedRun:
    """What a run of train.py has recorded from its second step on, as a line of the table.

    Args:
        folder: output_dir of the run.
        gpu: its name and GB; None: what the run has recorded.
    """
    config = parse_command_line(["--config", str(folder / RESOLVED_CONFIG)]).config
    ds_config = json.loads(read_text(str(folder / RESOLVED_DS_CONFIG)))
    steps = pd.DataFrame(read_metrics(folder)[1:])
    if steps.empty:
        raise UserError(f"{folder}: has no second step, the first that counts")
    start = read_metrics(folder, "start")[-1]
    ranks = start["world_size"]
    skeleton = Architecture.of(config.model, load_model_config(config.model)).skeleton
    text = skeleton.config.get_text_config()
    hidden, queries, keys, inner, _ = map(round, layer_widths(skeleton))
    sequence = round(steps.tokens.sum() / steps.examples.sum())
    offloads = set(offload_devices(ds_config).values()) != {"none"}
    model = config.model
    device = find_gpu(gpu or min(start["ranks"]).rpartition(": ")[2])  # HOST: DEVICE
    return PublishedRun(
        source="train.py",
        model=Path(model.name_or_path).name,
        hidden=hidden,
        layers=text.num_hidden_layers,
        heads=text.num_attention_heads,
        kv_heads=text.num_attention_heads * keys // queries,
        mlp_matrices=str(round((count_flops(skeleton).linear_cost - 2 * (queries + keys)) / inner)),
        mlp_width=inner,
        vocabulary=text.vocab_size,
        tied=text.tie_word_embeddings,
        gpu=device.name,
        gpu_gib=device.memory_gib,
        gpus=ranks,
        sequence=sequence,
        micro_batch=max(1, config.data.micro_batch_tokens // sequence),
        accumulation=round(steps.micro_steps.mean()),
        zero=f"{zero_stage(ds_config)}{' offload' * offloads}",
        checkpointing=str(int(model.activation_checkpointing)),
        weights="LoRA" if model.lora else "compiled" if model.compile else "eager",
        tokens_per_s_per_gpu=steps.tokens_per_s.median() / ranks,
        peak_gib=steps.memory_peak_gib.max() if "memory_peak_gib" in steps else None,
    )


def read_runs(file: str) -> list[PublishedRun]:
    """The lines of a table. Raises UserError: names the line and the column."""
    lines = csv.DictReader(io.StringIO(read_text(file)))
    rows = [{name: value or None for name, value in line.items()} for line in lines]
    try:
        runs = TypeAdapter(list[PublishedRun]).validate_python(rows)
    except ValidationError as error:
        problem = error.errors()[0]
        number, *column = problem["loc"]
        where = ".".join(map(str, column))
        raise UserError(f"{file}:{number + 2}: {where}: {problem['msg']}") from error
    if not runs:
        raise UserError(f"{file}: no runs; its first line has to name the columns")
    return runs


# --------------------------------------------------------------------------------------------------
# Fit


def ratios_of(runs: Sequence[PublishedRun], rates: Rates) -> np.ndarray:
    """Forecast over measured speed of each run; of a row for each if the rates are arrays."""
    return np.array([run.tokens_per_s(rates) / run.tokens_per_s_per_gpu for run in runs])


def fit(runs: Sequence[PublishedRun]) -> Rates:
    """The constants of the least squares of logarithms: of the runs' speeds in units of RUN_SPREAD,
    and of the constants' distance from ASSUMED in units of their spreads; by Gauss and Newton.
    """
    likely, spread = np.array([*ASSUMED.values()]).T[..., None]
    nudge = 1e-5
    around = nudge * np.hstack([np.zeros_like(likely), np.eye(len(likely))])
    found = np.log(likely)
    for _ in range(10):
        points = found + around
        rates = Rates(**dict(zip(ASSUMED, np.exp(points), strict=True)))
        errors = np.log(ratios_of(runs, rates)) / RUN_SPREAD
        residuals = np.vstack([errors, (points - np.log(likely)) / spread])
        slopes = (residuals[:, 1:] - residuals[:, :1]) / nudge
        found = found - np.linalg.lstsq(slopes, residuals[:, :1])[0]
    return Rates(**dict(zip(ASSUMED, np.exp(found[:, 0]).tolist(), strict=True)))


def held_out(runs: Sequence[PublishedRun], folds: Sequence[object]) -> np.ndarray:
    """Forecast over measured speed of each run, with constants that fit all runs of other folds.

    Args:
        folds: the fold of each run.
    """
    every, folds, ratios = np.array(runs), np.array(folds), np.empty(len(runs))
    for fold in np.unique(folds):
        is_out = folds == fold
        ratios[is_out] = ratios_of(every[is_out], fit(every[~is_out]))
    return ratios


def thirds(runs: Sequence[PublishedRun]) -> list[int]:
    """A fold for each run, drawn at random."""
    return np.random.default_rng(0).integers(0, 3, len(runs)).tolist()


def show_fit(runs: Sequence[PublishedRun]) -> None:
    """Print the constants that fit all runs, and the errors of runs that were held out."""
    rates = fit(runs)
    print("\n".join(f"{name:20} {getattr(rates, name):.3g}" for name in ASSUMED))
    print(f"a third held out: {errors(held_out(runs, thirds(runs)))}")
    for column in ("gpu", "model", "gpus", "source"):
        ratios = held_out(runs, [getattr(run, column) for run in runs])
        print(f"all of one {column} held out: {errors(ratios)}")


# --------------------------------------------------------------------------------------------------
# Forecasts


def show_forecasts(runs: Sequence[PublishedRun]) -> None:
    """Print a line per run, the verdicts on further nodes, and the errors."""
    ratios = ratios_of(runs, Rates(slowdown=DEEPSPEED_SLOWDOWN))
    measured = np.array([run.tokens_per_s_per_gpu for run in runs])
    forecasts = measured * ratios
    lines = [
        {
            "run": f"{run.model}, {run.gpus} {run.gpu}-{run.gpu_gib}gb, ZeRO {run.zero}",
            "tokens": f"{run.sequence:,} x {run.micro_batch} x {run.accumulation}",
            "measured": f"{run.tokens_per_s_per_gpu:,.0f}",
            "forecast": f"{run.tokens_per_s_per_gpu * ratio:,.0f}",
            "ratio": f"{ratio:.2f}",
            "GiB": run.peak_gib,
            "forecast of GiB": f"{estimate_memory(run.setup).peak / GIB:.1f}"
            if run.peak_gib
            else "",
        }
        for run, ratio in zip(runs, ratios, strict=True)
    ]
    print(pd.DataFrame(lines, dtype=object).fillna("").to_string(index=False))
    pairs = [
        (measured[b] / measured[a], forecasts[b] / forecasts[a])
        for (a, fewer), (b, more) in permutations(enumerate(runs), 2)
        if NODE_GPUS <= fewer.gpus < more.gpus and fewer.is_like(more)
    ]
    right = sum((real >= WORTHWHILE) == (forecast >= WORTHWHILE) for real, forecast in pairs)
    print(
        f"whether a GPU keeps {WORTHWHILE:.0%} of its tokens/s on further nodes: {right} of "
        f"{len(pairs)} pairs right\n{errors(ratios)}"
    )


def errors(ratios: np.ndarray) -> str:
    """The errors of forecasts over what was measured."""
    percent = 100 * abs(ratios - 1)
    nine = np.quantile(percent, 0.9)
    close = 100 * np.mean(percent <= 20)
    return f"nine of ten within {nine:.0f} %; median error {np.median(percent):.1f} %; " + (
        f"within 20 %: {close:.1f} %"
    )


if __name__ == "__main__":
    exit_on_error(main)
