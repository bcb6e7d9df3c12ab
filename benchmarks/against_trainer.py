"""Compare train.py with transformers' Trainer on CPU on the same work, in processes that alternate.

    python -m benchmarks.against_trainer [--rows 256] [--repeats 5] [--lengths LENGTHS.npy] ...

Each side trains one epoch of the same rows, whose prompts are not supervised, under the same
ds_config: the same model from random weights, global batch and precision. Trainer pads, with each
of its sampling strategies in turn, and has as many rows in a micro-batch as fit into
--micro_batch_tokens on average. benchmarks/trainer.py has the details.

Tokens are counted without padding, over all steps of the epoch. A ratio is train.py's tokens/s over
the other side's in the same repeat: the median over --repeats, with the smallest and largest one.
"""

import argparse
import json
import os
import string
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from zerotrain.tools.local_ranks import run_local_ranks
from zerotrain.tools.records import read_metrics

REPO = Path(__file__).resolve().parent.parent
TOKENIZER = REPO / "data" / "sample" / "model"
OURS = "train.py"
OPTIONS = {
    "ranks": 2, "rows": 256, "max_length": 1024, "global_batch_size": 64,
    "micro_batch_tokens": 2048, "hidden_size": 256, "layers": 8, "zero": 2, "vocab_size": 32_000,
    "repeats": 5,
}  # fmt: skip
STRATEGIES = "random,group_by_length,batch_rebalance"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    for name, default in OPTIONS.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--lengths", type=Path, help="int .npy; default: log-normal, mean 270")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--strategies", default=STRATEGIES, help="also padding_free")
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
    """The rows and the model's config.json that both sides read."""
    rng = np.random.default_rng(0)
    given = np.load(args.lengths) if args.lengths else rng.lognormal(4.97, 1.12, 50_000)
    write_rows(
        args.folder / "rows.jsonl", np.clip(rng.choice(given, args.rows), 8, args.max_length)
    )
    (args.folder / "model").mkdir()
    sizes = {
        "model_type": "llama",
        "vocab_size": args.vocab_size,
        "hidden_size": args.hidden_size,
        "intermediate_size": 4 * args.hidden_size,
        "num_hidden_layers": args.layers,
        "num_attention_heads": max(1, args.hidden_size // 64),
        "max_position_embeddings": args.max_length,
    }
    (args.folder / "model" / "config.json").write_text(json.dumps(sizes))


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
    runs = {side: [] for side in sides}
    for repeat in range(args.repeats):
        for side in sides:
            steps, peak_gib = run_side(args, side, repeat)
            step = pd.DataFrame(steps)
            tokens = step["tokens"].sum()
            seconds = step["step_seconds"]
            figures = {
                "tokens_per_s": tokens / seconds.sum(),
                "padding_efficiency": tokens / (step["tokens"] / step["padding_efficiency"]).sum(),
                "peak_gib": peak_gib,
                "steps": len(step),
                "tokens": int(tokens),
            }
            runs[side].append(figures)
            print(f"{side}: {figures['tokens_per_s']:,.0f} tokens/s", file=sys.stderr)
    return runs


def show(runs: dict[str, list[dict[str, float]]]) -> None:
    """Print a line for each side, with medians over the repeats."""
    ours = pd.DataFrame(runs[OURS])
    for side, of_side in runs.items():
        repeats = pd.DataFrame(of_side)
        ratios = ours["tokens_per_s"] / repeats["tokens_per_s"]
        ratio = f"{ratios.median():.2f} ({ratios.min():.2f} to {ratios.max():.2f})"
        cells = ", ".join(f"{key} {value:,.4g}" for key, value in repeats.median().items())
        print(f"{side}: train.py over it {ratio}; {cells}")


def launch(args: argparse.Namespace, *command: object) -> float:
    """Run a script on all ranks. Returns the memory of its largest process, GiB."""
    ended = run_local_ranks(args.ranks, command, args.folder / "log.txt")
    if ended.code:
        sys.exit(f"{ended.output[-4000:]}\nended with exit code {ended.code}")
    return ended.peak_gib


def run_side(
    args: argparse.Namespace, side: str, repeat: int
) -> tuple[list[dict[str, Any]], float]:
    """Return the step records of train.py, or of Trainer with a sampling strategy, and the peak
    memory, GiB.
    """
    run = args.folder / f"run_{repeat}"
    command = train_py(
        args.folder,
        {
            "output_dir": run,
            "ds_config": f"ds_configs/zero{args.zero}.json",
            "model.name_or_path": args.folder / "model",
            "model.from_config": True,
            "data.train_sources": [str(args.folder / "rows.jsonl")],
            "data.max_length": args.max_length,
            "data.micro_batch_tokens": args.micro_batch_tokens,
            "train.lr_schedule": "constant",
            "train.global_batch_size": args.global_batch_size,
            "train.epochs": 1,
            "train.precision": args.precision,
        },
    )
    if side == OURS:
        peak_gib = launch(args, *command)
        return read_metrics(run), peak_gib
    peak_gib = launch(args, *trainer(side, command))
    return read_trainer(run)["steps"], peak_gib


def train_py(folder: Path, settings: dict[str, Any]) -> list[object]:
    """The command of a run of train.py.

    Args:
        folder: for its config file and tokenized rows.
        settings: by dotted key.
    """
    file = folder / "config.yaml"
    file.write_text("tracking: {wandb: disabled}\ntrain: {learning_rate: 1e-4}\n")
    settings = {"model.tokenizer": TOKENIZER, "data.cache_dir": folder / "cache", **settings}
    flags = [f"--{key}={value}" for key, value in settings.items()]
    return ["train.py", "--config", file, *flags]


def trainer(strategy: str, command: list[object]) -> list[object]:
    """The command of benchmarks/trainer.py for the work of a command of train.py."""
    return ["-m", "benchmarks.trainer", strategy, *command[1:]]


def read_trainer(output_dir: Path) -> dict[str, Any]:
    """What benchmarks/trainer.py has measured."""
    return json.loads(output_dir.with_suffix(".json").read_text())


if __name__ == "__main__":
    main()
