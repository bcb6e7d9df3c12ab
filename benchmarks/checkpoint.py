"""Measure what checkpoints cost: stall of training, write rate, resume, conversion and export.

    python benchmarks/checkpoint.py [--ranks 2] [--ds_config ds_configs/zero2.json] [--saves 4]
        [--layers 16] [--hidden_size 1024] [--other_ranks 1] [--folder DIR] [--json]

Runs train.py on a Llama of 300 M parameters with random weights, fp32 on CPU. In the first run,
blocking and asynchronous saves alternate, and after each save `dd ... conv=fsync` writes the same
number of bytes to the same disk, one writer per rank, because the speed of a disk varies over time.
The stall is the time that the training loop spends in the saver, on the rank where it is longest.
Then the last checkpoint is resumed with the same and with another world size, and exported. Needs
about 14 GB of memory and 20 GB of disk.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from config.parse import parse_command_line
from runtime.agreement import gather_json
from runtime.errors import UserError, exit_on_error

REPO = Path(__file__).resolve().parent.parent
STEPS_BETWEEN = 2
CONFIG = """
output_dir: {folder}/run
ds_config: {ds_config}
model: {{name_or_path: {folder}/model, from_config: true}}
data:
  train_sources: [data/sample/train.jsonl]
  max_length: 128
  micro_batch_tokens: 128
  pad_to_multiple_of: 1
  cache_dir: {folder}/cache
train:
  global_batch_size: {ranks}
  steps: {steps}
  learning_rate: 1.0e-5
  precision: {precision}
checkpoint: {{every_steps: {every}, keep_last: 1}}
tracking: {{wandb: disabled}}
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--other_ranks", type=int, default=1, help="world size to convert to")
    parser.add_argument("--ds_config", default="ds_configs/zero2.json")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--saves", type=int, default=4, help="number of saves of each kind")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--hidden_size", type=int, default=1024, help="a multiple of 64")
    parser.add_argument("--max_shard_size", default="100MB", help="of the export")
    parser.add_argument("--folder", type=Path, help="for the files; default: a temporary one")
    parser.add_argument("--json", action="store_true", help="print on one line")
    parser.add_argument("--child", choices=["save", "resume"], help=argparse.SUPPRESS)
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if min(args.ranks, args.other_ranks, args.saves, args.layers) < 1 or args.hidden_size % 64:
        raise UserError("counts must be at least 1, --hidden_size a multiple of 64")
    if args.child:
        child(args.child, args.folder)
        return
    folder = (args.folder or Path(tempfile.mkdtemp(prefix="checkpoint_benchmark_"))).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        report = measure(args, folder)
    finally:
        if args.folder is None:
            shutil.rmtree(folder)
    print(json.dumps(report, indent=None if args.json else 2))


def measure(args: argparse.Namespace, folder: Path) -> dict:
    """Run all measurements: save, resume, convert and export."""
    write_inputs(args, folder)
    saves = summary(launch("save", folder, args.ranks), folder)
    resumed = launch("resume", folder, args.ranks)
    converted = launch("resume", folder, args.other_ranks)
    exports = {size: export(folder, size) for size in (args.max_shard_size, "5GB")}
    report: dict[str, Any] = {"ranks": args.ranks, "ds_config": args.ds_config, **saves}
    report["resume_s"] = {f"{args.ranks} ranks": resumed["load_s"]}
    report["resume_s"][f"{args.other_ranks} ranks"] = converted["load_s"]
    report["conversion_s"] = converted["conversion_s"]
    report["export_to_bfloat16"] = exports
    return report


def summary(saves: list[dict], folder: Path) -> dict:
    """Medians, their ratios, and the figures of each save."""
    lines = map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines())
    step_seconds = {line["step"]: line["step_seconds"] for line in lines if "loss" in line}
    writing = {
        save["step"] + i + 1
        for save in saves
        if save["async"]
        for i in range(save["steps_meanwhile"])
    }
    blocking, asynchronous = ([s for s in saves if s["async"] == kind] for kind in (False, True))

    def middle(values: Iterable[float]) -> float:
        return round(median(values), 3)

    stall, async_stall = (middle(s["stall_s"] for s in k) for k in (blocking, asynchronous))
    return {
        "checkpoint_mb": round(saves[0]["bytes"] / 1e6),
        "blocking_stall_s": stall,
        "async_stall_s": async_stall,
        "async_over_blocking": round(async_stall / stall, 3),
        "write_mb_per_s": middle(s["bytes"] / s["stall_s"] / 1e6 for s in blocking),
        "dd_mb_per_s": middle(s["bytes"] / s["dd_s"] / 1e6 for s in saves),
        "write_over_dd": middle(s["dd_s"] / s["stall_s"] for s in blocking),
        "step_s": middle(t for step, t in step_seconds.items() if step not in writing),
        "step_while_writing_s": middle(t for step, t in step_seconds.items() if step in writing),
        "saves": [
            {name: round(v, 2) if isinstance(v, float) else v for name, v in save.items()}
            for save in saves
        ],
    }


def write_inputs(args: argparse.Namespace, folder: Path) -> None:
    """Write the model and the config of the runs."""
    from transformers import AutoTokenizer, LlamaConfig

    LlamaConfig(
        vocab_size=32_000, hidden_size=args.hidden_size, intermediate_size=4 * args.hidden_size,
        num_hidden_layers=args.layers, num_attention_heads=args.hidden_size // 64,
        tie_word_embeddings=True,
    ).save_pretrained(folder / "model")  # fmt: skip
    AutoTokenizer.from_pretrained(REPO / "data/sample/model").save_pretrained(folder / "model")
    values = {"folder": folder, "ds_config": args.ds_config, "precision": args.precision}
    steps = (2 * args.saves + 1) * STEPS_BETWEEN  # the save at the last step is a blocking one
    text = CONFIG.format(**values, ranks=args.ranks, steps=steps, every=STEPS_BETWEEN)
    (folder / "config.yaml").write_text(text)


def launch(role: str, folder: Path, ranks: int) -> Any:
    """Run this file on `ranks` ranks with the deepspeed launcher; returns rank 0's report."""
    command = [Path(sys.executable).parent / "deepspeed", "--num_gpus", ranks]
    command += ["--master_port", 29_500 + int(time.time()) % 1000, __file__]
    command += ["--child", role, "--folder", folder]
    done = subprocess.run(
        [str(c) for c in command], cwd=REPO, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True,
    )  # fmt: skip
    if done.returncode:
        raise UserError(f"{role} on {ranks} ranks failed: {done.stdout[-2000:]}")
    report = json.loads((folder / f"{role}.json").read_text())
    if converted := re.search(r"converted .*?([\d.]+) s", done.stdout):
        report["conversion_s"] = float(converted[1])
    return report


def export(folder: Path, max_shard_size: str) -> dict:
    """Run scripts/export.py on the last checkpoint and sample its anonymous memory."""
    out = folder / "hf"
    command = [sys.executable, "scripts/export.py", folder / "run", out]
    command += ["--dtype", "bfloat16", "--max_shard_size", max_shard_size]
    began, peak_kb = time.perf_counter(), 0
    process = subprocess.Popen(
        [str(c) for c in command], cwd=REPO, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    status = Path(f"/proc/{process.pid}/status")
    while process.poll() is None:
        if found := re.search(r"RssAnon:\s+(\d+) kB", status.read_text()):
            peak_kb = max(peak_kb, int(found[1]))
        time.sleep(0.002)
    if process.returncode:
        raise UserError(f"scripts/export.py failed with exit code {process.returncode}")
    files = [path.stat().st_size for path in out.glob("*.safetensors")]
    shutil.rmtree(out)
    return {
        "seconds": round(time.perf_counter() - began, 1),
        "files": len(files),
        "largest_file_mb": round(max(files) / 1e6),
        "peak_anonymous_mb": round(peak_kb / 1000),
    }


# --------------------------------------------------------------------------------------------------
# On a rank


def child(role: str, folder: Path) -> None:
    """Run train.py: with a timed saver, or only until its checkpoint is loaded."""
    import torch.distributed as dist

    import train  # the script itself, to patch its saver and loader

    def load_and_exit(*args: Any, **options: Any) -> None:
        dist.barrier()
        began = time.perf_counter()
        load(*args, **options)
        dist.barrier()
        if dist.get_rank() == 0:
            seconds = time.perf_counter() - began
            (folder / "resume.json").write_text(json.dumps({"load_s": round(seconds, 1)}))
        sys.exit(0)

    load = train.load_start
    if role == "save":
        train.Saver = partial(TimedSaver, folder)
    else:
        train.load_start = load_and_exit
    train.main(parse_command_line(["--config", str(folder / "config.yaml")]).config, dry_run=False)


class TimedSaver:
    """train.py's saver with timing; every second save is asynchronous. After each save rank 0
    writes the measurements to `folder`/save.json.
    """

    def __init__(self, folder: Path, *args: Any, **options: Any) -> None:
        from checkpoint.save import Saver

        self.folder, self.saver = folder, Saver(*args, **options)
        self.nodes = self.saver.nodes
        self.saves: list[dict[str, Any]] = []
        self.pending: dict[str, Any] | None = None

    def save(self, state: Any) -> None:
        import torch.distributed as dist

        while self.pending and not self.saver.is_written:
            time.sleep(0.01)  # in a real run, enough steps pass between saves
        self.finish()
        is_async = len(self.saves) % 2 == 1
        self.saver.config = replace(self.saver.config, async_save=is_async)
        dist.barrier()
        self.pending = {"async": is_async, "step": state.progress.step, "steps_meanwhile": 0}
        self.waited_before = self.saver.waited_seconds
        self.began = time.perf_counter()
        self.saver.save(state)
        self.pending["stall_s"] = time.perf_counter() - self.began
        if not is_async:
            self.finish()

    @property
    def is_written(self) -> bool:
        """Called once per step."""
        if self.pending:
            self.pending["steps_meanwhile"] += 1
        return self.saver.is_written

    def finish(self) -> None:
        if self.pending is None:
            return
        began = time.perf_counter()
        self.saver.finish()
        self.pending["stall_s"] += time.perf_counter() - began
        # optimizer updates wait until the state has been copied
        self.pending["stall_s"] += self.saver.waited_seconds - self.waited_before
        self.pending["complete_s"] = time.perf_counter() - self.began
        self.record(self.pending)
        self.pending = None

    def close(self) -> None:
        self.finish()
        self.saver.close()

    def record(self, save: dict[str, Any]) -> None:
        """Record a save, with the time that dd takes for the same number of bytes."""
        import torch.distributed as dist

        from checkpoint.run_folder import list_complete

        (checkpoint,) = list_complete(self.folder / "run" / "checkpoints")
        files = json.loads((checkpoint / "manifest.json").read_text())["files"]
        share = [0] * dist.get_world_size()
        for name, entry in files.items():
            of_rank = re.search(r"rank_0*(\d+)[._]", name.replace("mp_rank", ""))
            share[int(of_rank[1]) if of_rank else 0] += entry["bytes"]
        target = self.folder / f"dd_{dist.get_rank()}"
        mib = round(share[dist.get_rank()] / 2**20)
        dist.barrier()
        began = time.perf_counter()
        subprocess.run(
            ["dd", "if=/dev/zero", f"of={target}", "bs=1M", f"count={mib}", "conv=fsync"],
            check=True, capture_output=True,
        )  # fmt: skip
        dist.barrier()
        save["dd_s"], save["bytes"] = time.perf_counter() - began, sum(share)
        target.unlink()
        stall_s = max(gather_json(self.saver.ranks, save["stall_s"]))
        self.saves.append({**save, "stall_s": stall_s})
        if dist.get_rank() == 0:
            (self.folder / "save.json").write_text(json.dumps(self.saves))


if __name__ == "__main__":
    exit_on_error(main)
