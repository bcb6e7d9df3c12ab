"""Memory of a rank that trains on one long row, by the number of ranks that share it.

    python -m benchmarks.long_rows [--tokens 32768] [--ranks 1,2,4] [--layers 2] ...

Each run is one step of train.py under ds_configs/ulysses.json, with sequence_parallel_size set to
the number of ranks, on a row of --tokens tokens and on one of 256. What a rank holds because of the
row is the difference of the largest rank's peak resident memory.
"""

import argparse
import json
import os
import tempfile
from pathlib import Path

from benchmarks.against_trainer import REPO, launch_ours, save_model

SHORT = 256  # tokens of the row that is compared with


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=32_768)
    parser.add_argument("--ranks", default="1,2,4")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden_size", type=int, default=256)
    args = parser.parse_args()
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "1000000"  # so that what is freed is no longer resident
    print("| ranks that share the row | peak GiB, largest rank | of that for the row |")
    print("|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        args.folder = Path(folder)
        save_model(args, 384, args.tokens)
        for ranks in map(int, args.ranks.split(",")):
            short = peak_gib(args, ranks, SHORT)
            peak = peak_gib(args, ranks, args.tokens)
            print(f"| {ranks} | {peak:.2f} | {peak - short:.2f} |", flush=True)


def peak_gib(args: argparse.Namespace, ranks: int, tokens: int) -> float:
    """Of the largest rank, in a step on one row."""
    folder = args.folder
    (folder / "rows.jsonl").write_text(json.dumps({"text": "a" * (tokens - 1)}) + "\n")
    ds_config = json.loads((REPO / "ds_configs" / "ulysses.json").read_text())
    ds_config["sequence_parallel_size"] = ranks
    (folder / "ds_config.json").write_text(json.dumps(ds_config))
    args.ranks = ranks
    run = folder / f"run_{ranks}_{tokens}"
    return launch_ours(args, run, tokens, tokens, {"global_batch_size": 1, "steps": 1})


if __name__ == "__main__":
    main()
