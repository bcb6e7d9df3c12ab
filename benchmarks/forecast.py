"""Forecasts of scripts/plan.py beside what others have measured.

    python -m benchmarks.forecast [FILE.csv] [--fit]

Prints a line for each run of the file (default: benchmarks/published_runs.csv): a GPU's tokens/s as
measured and as forecast, their ratio, and the peak memory if it is published. The last line has the
errors.

--fit fits the constants of zerotrain/tools/estimate.py to the file. It prints the constants, and
the errors of forecasts of runs that were held out of the fit.

Columns of the file: sizes of the model; the GPU (a100, h100 ...) and its GB; the number of GPUs, 8
to a node; tokens of a row, rows of a micro-batch, micro-steps; the ZeRO stage (FSDP's full sharding
is 3; "3 offload" is CPU offload); the share of layers that is recomputed (0, 1, or `selective`:
half, without effect on the estimated memory); `weights`, which may name LoRA or `compiled`; and the
measured speed and memory.
"""

import argparse
import csv
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Literal

import numpy as np
import pandas as pd
from pydantic import TypeAdapter, ValidationError
from transformers import AutoConfig

from zerotrain.config.schema import Config, DataConfig, LoraConfig, ModelConfig, TrainConfig
from zerotrain.runtime.errors import UserError, exit_on_error
from zerotrain.runtime.files import read_text
from zerotrain.runtime.machine import GIB, Machine
from zerotrain.tools.estimate import (
    GpuCluster,
    Rates,
    Workload,
    find_gpu,
    step_time,
)
from zerotrain.tools.memory import estimate_memory
from zerotrain.training.setup import Architecture, Setup, resolve

PUBLISHED = Path(__file__).with_name("published_runs.csv")
NODE_GPUS = 8
KINDS = {"2": "starcoder2", "3": "llama"}
"""Model type by the number of matrices in a feed-forward block."""
RECOMPUTED = {"0": 0.0, "1": 1.0, "selective": 0.5}
DEEPSPEED_SLOWDOWN = 1.62
"""The published runs of DeepSpeed 0.14 took this many times the forecast compute."""
ASSUMED = {
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
"""A constant's likely value without the table, and the spread of its logarithm."""
RUN_SPREAD = 0.05
"""Spread of the logarithm of a run's speed."""


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
        """The run, resolved as scripts/plan.py resolves it."""
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

    def tokens_per_s(self, rates: Rates) -> float:
        """Return the forecast for one GPU. It is an array if the rates are arrays."""
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
        flops = self.setup.architecture.flops
        workload = Workload(
            config=self.setup.config,
            architecture=self.setup.architecture,
            tokens=tokens,
            supervised=tokens,
            attention=tokens
            * (flops.of_examples(np.array([self.sequence]), 0) / self.sequence - flops.token),
            recomputed=RECOMPUTED[self.checkpointing],
            steps=1,
        )
        return tokens / step_time(self.setup, workload, self.accumulation, cluster)[1] / self.gpus


@cache
def architecture(shape: str, lora: bool) -> Architecture:
    """Return the model of a config.json on the meta device."""
    config = AutoConfig.for_model(**json.loads(shape))
    return Architecture.of(ModelConfig("published", lora=LoraConfig() if lora else None), config)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", nargs="?", default=str(PUBLISHED), help="table of runs")
    parser.add_argument("--fit", action="store_true", help="fit the constants to the table")
    args = parser.parse_args()
    runs = read_runs(args.file)
    show_fit(runs) if args.fit else show_forecasts(runs)


def read_runs(file: str) -> list[PublishedRun]:
    """Return the runs of a table. A UserError names the line and the column of a mistake."""
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
        raise UserError(f"{file} has no runs: give a line with the columns, then a line per run")
    return runs


# --------------------------------------------------------------------------------------------------
# Fit


def ratios_of(runs: Sequence[PublishedRun], rates: Rates) -> np.ndarray:
    """Return forecast / measured speed of each run. If the rates are arrays, each run has a row."""
    return np.array([run.tokens_per_s(rates) / run.tokens_per_s_per_gpu for run in runs])


def fit(runs: Sequence[PublishedRun]) -> Rates:
    """Return the constants that fit the runs best.

    Gauss-Newton minimizes a sum of squared logarithms: forecast / measured speed of each run, in
    units of RUN_SPREAD, and each constant / its value in ASSUMED, in units of its spread.
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
    """Return forecast / measured speed of each run, with the constants fitted to the other folds.

    Args:
        folds: one fold per run.
    """
    every, folds, ratios = np.array(runs), np.array(folds), np.empty(len(runs))
    for fold in np.unique(folds):
        is_out = folds == fold
        ratios[is_out] = ratios_of(every[is_out], fit(every[~is_out]))
    return ratios


def thirds(runs: Sequence[PublishedRun]) -> list[int]:
    """Return a random fold, of three, for each run."""
    return np.random.default_rng(0).integers(0, 3, len(runs)).tolist()


def show_fit(runs: Sequence[PublishedRun]) -> None:
    """Print the constants that fit all runs, and the errors of held-out runs."""
    rates = fit(runs)
    print("\n".join(f"{name:20} {getattr(rates, name):.3g}" for name in ASSUMED))
    print(f"a third held out: {errors(held_out(runs, thirds(runs)))}")
    for column in ("gpu", "model", "gpus", "source"):
        ratios = held_out(runs, [getattr(run, column) for run in runs])
        print(f"all of one {column} held out: {errors(ratios)}")


# --------------------------------------------------------------------------------------------------
# Forecasts


def show_forecasts(runs: Sequence[PublishedRun]) -> None:
    """Print a line per run, and the errors."""
    ratios = ratios_of(runs, Rates(slowdown=DEEPSPEED_SLOWDOWN))
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
    print(errors(ratios))


def errors(ratios: np.ndarray) -> str:
    """Return a summary of the errors of forecasts, from forecast / measured speeds."""
    percent = 100 * abs(ratios - 1)
    return (
        f"90% of runs within {np.quantile(percent, 0.9):.0f}%; median error "
        f"{np.median(percent):.1f}%; {np.mean(percent <= 20):.1%} of runs within 20%"
    )


if __name__ == "__main__":
    exit_on_error(main)
