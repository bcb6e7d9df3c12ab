"""Compare train.py with transformers' Trainer on CPU on the same work, in processes that alternate.

    python -m benchmarks.against_trainer [--rows 256] [--repeats 5] [--lengths LENGTHS.npy] ...

Each side trains one epoch of the same rows, whose prompts are not supervised, under the same
ds_config: the same model from random weights, global batch and precision. Trainer pads, with each
of its sampling strategies in turn, and has as many rows in a micro-batch as fit into
--micro_batch_tokens on average. The strategy trl is TRL's SFTTrainer, where it is installed, with
its packing, and as many tokens in a step. benchmarks/trainer.py has the details.

Tokens are counted without padding, over all steps of the epoch. A ratio is train.py's tokens/s over
the other side's in the same repeat: the median over --repeats, with the smallest and largest one.
"""

import argparse
import json
import os
import statistics
import string
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer, LlamaConfig

from zerotrain.tools.local_ranks import run_local_ranks
from zerotrain.tracking.metrics import read_metrics

REPO = Path(__file__).resolve().parent.parent
TOKENIZER = REPO / "data" / "sample" / "model"
OURS = "train.py"
OPTIONS = {
    "ranks": 2, "rows": 256, "max_length": 1024, "global_batch_size": 64,
    "micro_batch_tokens": 2048, "hidden_size": 256, "layers": 8, "zero": 2, "vocab_size": 32_000,
    "repeats": 5,
}  # fmt: skip
STRATEGIES = ("random", "group_by_length", "batch_rebalance", "trl")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    for name, default in OPTIONS.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--lengths", type=Path, help="int .npy; default: log-normal, mean 270")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--strategies", default=",".join(STRATEGIES))
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write what was measured")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        args.folder = Path(folder)
        write_inputs(args)
        runs = compare(args)
    if args.json:
        args.json.write_text(json.dumps(runs, indent=2))
    show(runs)


def write_inputs(args: argparse.Namespace) -> None:
    """The rows, the model's config.json and the ds_config that both sides read."""
    rng = np.random.default_rng(0)
    given = np.load(args.lengths) if args.lengths else rng.lognormal(4.97, 1.12, 50_000)
    write_rows(
        args.folder / "rows.jsonl", np.clip(rng.choice(given, args.rows), 8, args.max_length)
    )
    LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=args.vocab_size,
        hidden_size=args.hidden_size,
        intermediate_size=4 * args.hidden_size,
        num_hidden_layers=args.layers,
        num_attention_heads=max(1, args.hidden_size // 64),
        max_position_embeddings=args.max_length,
    ).save_pretrained(args.folder / "model")
    AutoTokenizer.from_pretrained(TOKENIZER).save_pretrained(args.folder / "model")
    ds_config = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "train_batch_size": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": {"stage": args.zero},
        "bf16": {"enabled": "auto"},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": "auto", "betas": "auto", "weight_decay": "auto", "torch_adam": True},
        },
    }
    (args.folder / "ds_config.json").write_text(json.dumps(ds_config))


def write_rows(file: Path, lengths: np.ndarray) -> None:
    """Rows of as many tokens, with an end token; half of a row is its prompt."""
    rng = np.random.default_rng(0)
    letters = list(string.ascii_lowercase)  # one token each
    with file.open("w") as out:
        for length in lengths.astype(int):
            text = "".join(rng.choice(letters, length - 1))
            row = {"prompt": text[: length // 2], "completion": text[length // 2 :]}
            out.write(json.dumps(row) + "\n")


def compare(args: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    """{side: what was measured in each repeat}, the sides of a repeat one after the other."""
    sides = [OURS, *args.strategies.split(",")]
    if "trl" in sides and find_spec("trl") is None:
        print("trl: not installed, left out", file=sys.stderr)
        sides.remove("trl")
    runs: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
    for repeat in range(args.repeats):
        for side in sides:
            began = time.time()
            run = run_ours(args, repeat) if side == OURS else run_trainer(args, side)
            steps, peak_gib = run
            seconds = [step["step_seconds"] for step in steps]
            tokens = sum(step["tokens"] for step in steps)
            padded = sum(step["tokens"] / step["padding_efficiency"] for step in steps)
            figures = {
                "tokens_per_s": tokens / sum(seconds),
                "padding_efficiency": tokens / padded,
                "peak_gib": peak_gib,
                "first_step_seconds": steps[0]["time"] - began,
                "step_seconds": statistics.fmean(seconds),
                "step_seconds_deviation": statistics.pstdev(seconds) / statistics.fmean(seconds),
                "steps": len(steps),
                "tokens": tokens,
            }
            runs[side].append(figures)
            print(f"{side}: {figures['tokens_per_s']:,.0f} tokens/s", file=sys.stderr)
    return runs


def show(runs: dict[str, list[dict[str, float]]]) -> None:
    """Print a line for each side, with medians over the repeats."""
    for side, of_side in runs.items():
        pairs = zip(runs[OURS], of_side, strict=True)
        ratios = [ours["tokens_per_s"] / other["tokens_per_s"] for ours, other in pairs]
        ratio = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        medians = {key: statistics.median(run[key] for run in of_side) for key in of_side[0]}
        cells = ", ".join(f"{key} {value:,.4g}" for key, value in medians.items())
        print(f"{side}: train.py over it {ratio}; {cells}")


def launch(args: argparse.Namespace, *command: object) -> float:
    """Run a script on all ranks. Returns the memory of its largest process, GiB."""
    ended = run_local_ranks(args.ranks, command, args.folder / "log.txt")
    if ended.code:
        sys.exit(f"{ended.output[-4000:]}\nended with exit code {ended.code}")
    return ended.peak_gib


def run_ours(args: argparse.Namespace, repeat: int) -> tuple[list[dict[str, Any]], float]:
    """The step records of train.py, and its peak memory, GiB."""
    config = {
        "output_dir": str(args.folder / f"run_{repeat}"),
        "ds_config": str(args.folder / "ds_config.json"),
        "model": {"name_or_path": str(args.folder / "model"), "from_config": True},
        "data": {
            "train_sources": [str(args.folder / "rows.jsonl")],
            "max_length": args.max_length,
            "micro_batch_tokens": args.micro_batch_tokens,
            "cache_dir": str(args.folder / "cache"),
        },
        "train": {
            "learning_rate": 1e-4,
            "lr_schedule": "constant",
            "global_batch_size": args.global_batch_size,
            "epochs": 1,
            "precision": args.precision,
        },
        "tracking": {"wandb": "disabled"},
    }
    file = args.folder / "config.yaml"
    file.write_text(json.dumps(config))  # JSON is YAML
    peak_gib = launch(args, "train.py", "--config", file)
    return read_metrics(config["output_dir"]), peak_gib


def run_trainer(args: argparse.Namespace, strategy: str) -> tuple[list[dict[str, Any]], float]:
    """The same of Trainer with a sampling strategy."""
    out = args.folder / "trainer.json"
    flags = {"strategy": strategy, "out": out, "rows": args.folder / "rows.jsonl"}
    flags |= {name: args.folder / "model" for name in ("model", "tokenizer")}
    flags["ds_config"] = args.folder / "ds_config.json"
    for name in ("global_batch_size", "micro_batch_tokens", "precision"):
        flags[name] = getattr(args, name)
    words = [f"--{name}={value}" for name, value in flags.items()]
    peak_gib = launch(args, "-m", "benchmarks.trainer", *words)
    return json.loads(out.read_text())["steps"], peak_gib


if __name__ == "__main__":
    main()
