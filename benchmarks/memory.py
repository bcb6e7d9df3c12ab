"""Measure memory and speed of the data pipeline: tokenizing, then a whole epoch on every rank.

    python benchmarks/memory.py [--rows 1e6] [--tokens 300] [--ranks 2] [--folder DIR] [--json]

Writes --rows rows of about --tokens tokens, tokenizes them as a run would, and iterates over a
whole epoch with the loader of every rank, one process per rank, with torch, transformers and
DeepSpeed imported as in training. Reports peak resident memory per rank, split into private memory
and pages of the mapped cache, which the kernel can reclaim. The defaults need about 3 GB of disk.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from data.check_sources import parse_with_sources
from runtime.errors import UserError, exit_on_error

REPO = Path(__file__).resolve().parent.parent
CONFIG = """
output_dir: {folder}/run
model: {{name_or_path: data/sample/model, from_config: true}}
data:
  train_sources: [{folder}/rows.jsonl]
  max_length: 1024
  micro_batch_tokens: 16384
  cache_dir: {folder}/cache
train: {{global_batch_size: 512, epochs: 1, learning_rate: 1.0e-3}}
tracking: {{wandb: disabled}}
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=float, default=1e6)
    parser.add_argument(
        "--tokens", type=int, default=300, help="per row, roughly: 300 gives a mean of 353"
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="for the files; default: a temporary one")
    parser.add_argument("--json", action="store_true", help="print on one line")
    parser.add_argument("--child", choices=["tokenize", "walk"], help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rows < 1 or args.tokens < 10 or args.ranks < 1:
        raise UserError("--rows and --ranks must be at least 1, --tokens at least 10")
    if args.child:
        print(json.dumps(child(args.child, args.folder / "config.yaml", args.rank, args.ranks)))
        return
    folder = args.folder or Path(tempfile.mkdtemp(prefix="memory_benchmark_"))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        report = measure(folder, int(args.rows), args.tokens, args.ranks)
    finally:
        if args.folder is None:
            shutil.rmtree(folder)
    print(json.dumps(report, indent=None if args.json else 2))


def measure(folder: Path, rows: int, tokens: int, ranks: int) -> dict:
    """Write the rows, tokenize them, and iterate over an epoch on every rank."""
    write_rows(folder / "rows.jsonl", rows, tokens)
    (folder / "config.yaml").write_text(CONFIG.format(folder=folder.resolve()))
    tokenized = finish(start("tokenize", folder, 0, ranks))
    walkers = [start("walk", folder, rank, ranks) for rank in range(ranks)]
    walks = [finish(process) for process in walkers]
    cache = sum(f.stat().st_size for f in (folder / "cache").rglob("*") if f.is_file())
    return {"rows": rows, "cache_mb": round(cache / 1e6), "tokenize": tokenized, "ranks": walks}


def write_rows(path: Path, rows: int, tokens: int, most_sums: int = 90) -> None:
    """Write sums as in data/sample, concatenated to log-normal lengths; 10 tokens or so per sum."""
    import numpy as np

    rng = np.random.default_rng(0)
    sums = np.clip(rng.lognormal(np.log(tokens / 10) - 0.32, 0.8, rows), 1, most_sums).astype(int)
    with path.open("w") as out:
        for count in sums.tolist():
            a, b = rng.integers(1, 99, 2).tolist()
            text = " ".join(f"{a + i * b}+{b}={a + (i + 1) * b}." for i in range(count))
            out.write(f'{{"prompt": "Start at {a} and add {b}.", "completion": "{text}"}}\n')


def start(role: str, folder: Path, rank: int, ranks: int) -> subprocess.Popen:
    command = [sys.executable, __file__, "--child", role, "--folder", folder, "--rank", rank]
    command += ["--ranks", ranks]
    return subprocess.Popen([str(c) for c in command], cwd=REPO, stdout=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen) -> dict:
    output, _ = process.communicate()
    if process.returncode:
        raise UserError(f"a child process failed with exit code {process.returncode}")
    return json.loads(output.splitlines()[-1])


def child(role: str, config_file: Path, rank: int, ranks: int) -> dict:
    """Tokenize, or iterate over one rank's epoch; with the same imports as training."""
    import deepspeed  # noqa: F401

    from data.loader import load_steps
    from tracking.console import quieten_libraries
    from tracking.startup import open_plans

    quieten_libraries(is_first=True)
    memory = {"imports": memory_mb()}
    config = parse_with_sources(["--config", str(config_file)]).config
    began = time.perf_counter()
    _, _, plan, _ = open_plans(config, ranks)
    seconds = time.perf_counter() - began
    memory["opened"] = memory_mb()
    if role == "tokenize":
        return {
            "seconds": round(seconds, 1),
            "rows_per_s": round(len(plan.data) / seconds),
            "tokens": plan.data.meta["tokens"],
            "peak_mb": peak_mb(),
        }
    began = time.perf_counter()
    rows = 0
    for step in load_steps(plan, rank, 0, plan.steps_per_epoch):
        rows += sum(len(micro_step[rank]) for micro_step in step.plan.micro_batches)
    seconds = time.perf_counter() - began
    memory["after an epoch"] = memory_mb()
    return {
        "rank": rank,
        "rows_per_s": round(rows / seconds),
        "peak_mb": peak_mb(),
        **{f"{name}_mb": values for name, values in memory.items()},
    }


def memory_mb() -> dict[str, int]:
    """Resident memory of this process: private memory, and pages of mapped files."""
    status = Path("/proc/self/status").read_text()
    kb = {line.split(":")[0]: int(line.split()[1]) for line in status.splitlines() if "Rss" in line}
    return {"private": kb["RssAnon"] // 1000, "mapped": kb["RssFile"] // 1000}


def peak_mb() -> int:
    """Peak resident memory of this process, both kinds together."""
    status = Path("/proc/self/status").read_text()
    return next(int(x.split()[1]) for x in status.splitlines() if x.startswith("VmHWM")) // 1000


if __name__ == "__main__":
    exit_on_error(main)
