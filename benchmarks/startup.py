"""Seconds from the start of a rank to the end of its first optimizer step: train.py beside
transformers' Trainer, in processes that alternate.

    python -m benchmarks.startup [--ranks 2] [--repeats 5] [train.py's options]

Both sides run under torchrun, whose own seconds are not counted, with the demo's
model, rows, ZeRO stage and global batch, and equal numbers of threads. Before anything is measured
each side runs once, so that bytecode and files are cached. Trainer loads the rows as train.py has
tokenized them, with labels, from a data set on disk, and pads micro-batches of 8 rows; train.py
opens its own cache, which is deleted beforehand in the runs called cold. Each figure is the median
over --repeats, of rank 0.
"""

import argparse
import itertools
import json
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import psutil

MODEL = "data/sample/model"
DS_CONFIG = "ds_configs/zero2.json"
GLOBAL_BATCH = 16  # as in recipes/demo.yaml
MICRO_BATCH = 8
SIDES = ("train.py, cold", "train.py", "Trainer")
PHASES = ("imports", "config and data", "model and engine", "first step")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5, help="and a first one, not counted")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)  # in a rank
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args, options = parser.parse_known_args()
    if args.side:
        times = run_trainer(args) if args.side == "Trainer" else run_ours(args, options)
        if times is not None:
            (args.folder / "times.json").write_text(json.dumps(times))
        return
    with tempfile.TemporaryDirectory() as folder:
        args.folder = Path(folder)
        compare(args, options)


def compare(args: argparse.Namespace, options: list[str]) -> None:
    """Run the sides in turn, and print a table of medians."""
    seconds: dict[str, list[list[float]]] = {side: [] for side in SIDES}
    for repeat in range(args.repeats + 1):
        for side in SIDES:
            measured = measure(args, side, options)
            if repeat or not args.repeats:  # the first one fills the caches
                seconds[side].append(measured)
    print(f"| seconds | {' | '.join(PHASES)} | sum |")
    print("|---" * (len(PHASES) + 2) + "|")
    for side, rows in seconds.items():
        medians = [statistics.median(column) for column in zip(*rows, strict=True)]
        total = statistics.median(map(sum, rows))
        print(f"| {side} | {' | '.join(f'{x:.1f}' for x in (*medians, total))} |")
    ratios = [
        sum(ours) / sum(peer)
        for ours, peer in zip(seconds["train.py"], seconds["Trainer"], strict=True)
    ]
    print(f"\ntrain.py / Trainer: {statistics.median(ratios):.2f}", end=" ")
    print(f"({min(ratios):.2f} to {max(ratios):.2f} in {args.repeats} repeats)")


def measure(args: argparse.Namespace, side: str, options: list[str]) -> list[float]:
    """The seconds of each phase."""
    from benchmarks.against_trainer import launch  # here, since ranks would import it too

    folder = args.folder
    shutil.rmtree(folder / "run", ignore_errors=True)
    if side == "train.py, cold":
        shutil.rmtree(folder / "cache", ignore_errors=True)
    # as a module, so that it can import train.py
    launch(args, "--module", "benchmarks.startup", "--side", side, "--folder", folder, *options)
    times = json.loads((folder / "times.json").read_text())
    return [end - begin for begin, end in itertools.pairwise(times)]


def run_ours(args: argparse.Namespace, options: list[str]) -> list[float] | None:
    """What train.py does. Returns, on rank 0, the Unix time at its start and after each phase."""
    import train
    from zerotrain.config.parse import parse_command_line

    imported = time.time()
    run = args.folder / "run"
    given = {
        "--config": "recipes/demo.yaml",
        "--output_dir": run,
        "--ds_config": DS_CONFIG,
        "--model.name_or_path": MODEL,
        "--data.train_sources": "[data/sample/train.jsonl]",
        "--data.eval_sources": "[]",
        "--data.cache_dir": args.folder / "cache",
        "--train.steps": 1,
        "--tracking.wandb": "disabled",
    }
    words = [str(word) for pair in given.items() for word in pair]
    train.main(parse_command_line([*words, *options]).config)
    if int(os.environ["LOCAL_RANK"]):
        return None
    described = (run / "resolved_config.yaml").stat().st_mtime
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    ends = [next(r["time"] for r in records if r["kind"] == kind) for kind in ("start", "train")]
    rows = args.folder / "rows"
    if not rows.exists():
        save_rows(args.folder / "cache", rows)
    return [psutil.Process().create_time(), imported, described, *ends]


def save_rows(cache: Path, rows: Path) -> None:
    """Write the tokenized rows as a data set for Trainer."""
    import datasets

    [file] = cache.glob("*/examples.arrow")
    found = datasets.Dataset.from_file(str(file)).select_columns(["input_ids", "loss_mask"])

    def with_labels(row: dict) -> dict:
        pairs = zip(row["input_ids"], row["loss_mask"], strict=True)
        return {"labels": [token if supervised else -100 for token, supervised in pairs]}

    found.map(with_labels, remove_columns="loss_mask").save_to_disk(rows)


def run_trainer(args: argparse.Namespace) -> list[float] | None:
    """Returns, on rank 0, the Unix time at its start and after each phase."""
    import datasets
    import deepspeed
    import torch
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        AutoTokenizer,
        DataCollatorForSeq2Seq,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    times = [psutil.Process().create_time(), time.time()]
    # as in train.py: on CPU DeepSpeed would compile a shared-memory all-reduce
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: object, **__: object) -> None:
            times.append(time.time())

        on_step_end = on_step_begin

    arguments = TrainingArguments(
        str(args.folder / "trainer"),
        deepspeed=DS_CONFIG,
        per_device_train_batch_size=MICRO_BATCH,
        gradient_accumulation_steps=max(1, GLOBAL_BATCH // MICRO_BATCH // args.ranks),
        max_steps=1,
        use_cpu=not torch.cuda.is_available(),
        bf16=torch.cuda.is_available(),
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    rows = datasets.load_from_disk(args.folder / "rows")
    times.append(time.time())
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(MODEL))
    collator = DataCollatorForSeq2Seq(tokenizer, pad_to_multiple_of=8)
    Trainer(
        model, arguments, train_dataset=rows, data_collator=collator, callbacks=[Clock()]
    ).train()
    return None if int(os.environ["LOCAL_RANK"]) else times


if __name__ == "__main__":
    main()
