"""Compare train.py with transformers' Trainer on CPU on the same work, in processes that alternate.

    python -m benchmarks.against_trainer [--rows 256] [--repeats 5] [--lengths LENGTHS.npy] ...

Each side trains one epoch of the same rows, whose prompts are not supervised, under the same
ds_config: the same model from random weights, global batch and precision. Trainer pads, with each
of its sampling strategies in turn, and has as many rows in a micro-batch as fit into
--micro_batch_tokens on average. The strategy trl is TRL's SFTTrainer, where it is installed, with
its packing, and as many tokens in a step.

Tokens are counted without padding, over all steps of the epoch. A ratio is train.py's tokens/s over
the other side's in the same repeat: the median over --repeats, with the smallest and largest one.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from zerotrain.tools.local_ranks import run_local_ranks

REPO = Path(__file__).resolve().parent.parent
TOKENIZER = REPO / "data" / "sample" / "model"
OURS = "train.py"
STRATEGIES = ("random", "group_by_length", "batch_rebalance", "trl")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--lengths", type=Path, help="int .npy; default: log-normal, mean 270")
    parser.add_argument("--max_length", type=int, default=1024)
    parser.add_argument("--global_batch_size", type=int, default=64)
    parser.add_argument("--micro_batch_tokens", type=int, default=2048)
    parser.add_argument("--hidden_size", type=int, default=256)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--zero", type=int, default=2, help="ZeRO stage")
    parser.add_argument("--vocab_size", type=int, default=32_000)
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--strategies", default=",".join(STRATEGIES))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write what was measured")
    parser.add_argument("--trainer", help=argparse.SUPPRESS)  # in a rank of Trainer: the strategy
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.trainer:
        run_trainer(args)
        return
    with tempfile.TemporaryDirectory() as folder:
        args.folder = Path(folder)
        write_inputs(args)
        runs = compare(args)
    if args.json:
        args.json.write_text(json.dumps(runs, indent=2))
    Console(width=110).print(table_of(runs))


def write_inputs(args: argparse.Namespace) -> None:
    """The rows, the model's config.json and the ds_config that both sides read."""
    rng = np.random.default_rng(0)
    given = np.load(args.lengths) if args.lengths else rng.lognormal(4.97, 1.12, 50_000)
    lengths = np.clip(rng.choice(given, args.rows), 8, args.max_length).astype(int)
    words = [chr(c) for c in range(ord("a"), ord("z") + 1)]  # one token each
    with (args.folder / "rows.jsonl").open("w") as file:
        for length in lengths:
            text = "".join(rng.choice(words, length - 1))
            row = {"prompt": text[: length // 2], "completion": text[length // 2 :]}
            file.write(json.dumps(row) + "\n")
    save_model(args, args.vocab_size, args.max_length)
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


def save_model(args: argparse.Namespace, vocab_size: int, max_length: int) -> None:
    """A Llama's config.json, and a tokenizer of fewer tokens."""
    from transformers import AutoTokenizer, LlamaConfig

    LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=vocab_size,
        hidden_size=args.hidden_size,
        intermediate_size=4 * args.hidden_size,
        num_hidden_layers=args.layers,
        num_attention_heads=max(1, args.hidden_size // 64),
        max_position_embeddings=max_length,
    ).save_pretrained(args.folder / "model")
    AutoTokenizer.from_pretrained(TOKENIZER).save_pretrained(args.folder / "model")


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
            if side == OURS:
                steps, peak_gib = run_ours(args, repeat)
            else:
                steps, peak_gib = start_trainer(args, side)
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


def table_of(runs: dict[str, list[dict[str, float]]]) -> Table:
    """Medians over the repeats."""
    table = Table(
        "", "tokens/s", "train.py / this (min, max)", "padding efficiency", "peak GiB",
        "first step, s", "step, s", "deviation of a step, %", "steps",
    )  # fmt: skip
    for side, of_side in runs.items():
        ratios = [
            ours["tokens_per_s"] / other["tokens_per_s"]
            for ours, other in zip(runs[OURS], of_side, strict=True)
        ]
        median = {key: statistics.median(run[key] for run in of_side) for key in of_side[0]}
        table.add_row(
            side,
            f"{median['tokens_per_s']:,.0f}",
            f"{statistics.median(ratios):.2f} ({min(ratios):.2f}, {max(ratios):.2f})",
            f"{median['padding_efficiency']:.3f}",
            f"{median['peak_gib']:.2f}",
            f"{median['first_step_seconds']:.1f}",
            f"{median['step_seconds']:.2f}",
            f"{100 * median['step_seconds_deviation']:.0f}",
            f"{median['steps']:.0f}",
        )
    return table


def launch(args: argparse.Namespace, *command: object) -> float:
    """Run a script on all ranks. Returns the memory of its largest process, GiB."""
    ended = run_local_ranks(args.ranks, command, args.folder / "log.txt")
    if ended.code:
        sys.exit(f"{ended.output[-4000:]}\nended with exit code {ended.code}")
    return ended.peak_gib


def run_ours(args: argparse.Namespace, repeat: int) -> tuple[list[dict[str, Any]], float]:
    """The step records of train.py, and its peak memory, GiB."""
    run = args.folder / f"run_{repeat}"
    train = {
        "global_batch_size": args.global_batch_size,
        "epochs": 1,
        "lr_schedule": "constant",
        "precision": args.precision,
    }
    peak_gib = launch_ours(args, run, args.max_length, args.micro_batch_tokens, train)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == "train"], peak_gib


def launch_ours(
    args: argparse.Namespace, run: Path, max_length: int, tokens: int, train: dict[str, Any]
) -> float:
    """Run train.py with micro-batches of `tokens` tokens. Returns its peak memory, GiB."""
    config = {
        "output_dir": str(run),
        "ds_config": str(args.folder / "ds_config.json"),
        "model": {
            "name_or_path": str(args.folder / "model"),
            "from_config": True,
            "loss_chunk_tokens": 256,  # memory for larger logits is mapped anew for each chunk
        },
        "data": {
            "train_sources": [str(args.folder / "rows.jsonl")],
            "max_length": max_length,
            "micro_batch_tokens": tokens,
            "cache_dir": str(args.folder / "cache"),
        },
        "train": {"learning_rate": 1e-4, **train},
        "tracking": {"wandb": "disabled"},
    }
    file = args.folder / "config.yaml"
    file.write_text(json.dumps(config))  # JSON is YAML
    return launch(args, "train.py", "--config", file)


def start_trainer(args: argparse.Namespace, strategy: str) -> tuple[list[dict[str, Any]], float]:
    """The same of Trainer with a sampling strategy."""
    options = ("global_batch_size", "micro_batch_tokens", "precision")
    flags = [f"--{name}={getattr(args, name)}" for name in options]
    module = ("-m", "benchmarks.against_trainer")
    command = (*module, "--trainer", strategy, "--folder", args.folder, *flags)
    peak_gib = launch(args, *command)
    return json.loads((args.folder / "trainer.json").read_text()), peak_gib


def run_trainer(args: argparse.Namespace) -> None:
    """One rank of Trainer; the first one writes the step records."""
    import deepspeed
    import torch
    from datasets import Dataset
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        AutoTokenizer,
        DataCollatorForSeq2Seq,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    # as in train.py: on CPU DeepSpeed would compile a shared-memory all-reduce
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    packs = args.trainer == "trl"
    tokenizer = AutoTokenizer.from_pretrained(args.folder / "model")
    examples = Dataset.from_list(read_examples(args.folder / "rows.jsonl", tokenizer))
    per_rank = args.global_batch_size // int(os.environ["WORLD_SIZE"])
    mean_tokens = sum(map(len, examples["input_ids"])) / len(examples)
    if packs:
        micro_batch_rows = 1
        accumulation = max(1, round(per_rank * mean_tokens / args.micro_batch_tokens))
    else:
        fitting = max(1, int(args.micro_batch_tokens / mean_tokens))
        micro_batch_rows = max(n for n in range(1, fitting + 1) if per_rank % n == 0)
        accumulation = per_rank // micro_batch_rows
    options = {
        "output_dir": str(args.folder / "trainer"),
        "deepspeed": str(args.folder / "ds_config.json"),
        "bf16": args.precision == "bf16",
        "per_device_train_batch_size": micro_batch_rows,
        "gradient_accumulation_steps": accumulation,
        "num_train_epochs": 1,
        "learning_rate": 1e-4,
        "lr_scheduler_type": "constant",
        "use_cpu": True,
        "gradient_checkpointing": False,
        "report_to": "none",
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
    }
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(args.folder / "model"),
        dtype=torch.bfloat16 if options["bf16"] else torch.float32,
    )
    if packs:
        from trl import SFTConfig, SFTTrainer

        arguments = SFTConfig(**options, packing=True, max_length=args.micro_batch_tokens)
        trainer = SFTTrainer(model, arguments, train_dataset=examples, processing_class=tokenizer)
    else:
        arguments = TrainingArguments(**options, train_sampling_strategy=args.trainer)
        collator = DataCollatorForSeq2Seq(tokenizer, pad_to_multiple_of=8)
        trainer = Trainer(model, arguments, train_dataset=examples, data_collator=collator)
    collate = trainer.data_collator
    steps: list[dict[str, float]] = []
    counts: list[tuple[int, int]] = []  # tokens without and with padding of each micro-batch

    def counting_collate(batch: list[dict]) -> Any:
        collated = collate(batch)
        counts.append((sum(len(e["input_ids"]) for e in batch), collated["input_ids"].numel()))
        return collated

    class Clock(TrainerCallback):
        began = 0.0

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.began = self.began or time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            now = time.perf_counter()
            steps.append({"step_seconds": now - self.began, "time": time.time()})
            self.began = now

    trainer.data_collator = counting_collate
    trainer.add_callback(Clock())
    trainer.train()
    of_ranks: list[Any] = [None] * arguments.world_size
    torch.distributed.all_gather_object(of_ranks, counts)
    for i, step in enumerate(steps):
        of_step = [c[i * accumulation : (i + 1) * accumulation] for c in of_ranks]
        tokens, padded_tokens = np.sum(of_step, axis=(0, 1)).tolist()
        step["tokens"] = tokens
        step["padding_efficiency"] = tokens / padded_tokens
    if arguments.process_index == 0:
        (args.folder / "trainer.json").write_text(json.dumps(steps))
    torch.distributed.destroy_process_group()  # or its threads may abort the exit of Python


def read_examples(rows: Path, tokenizer: Any) -> list[dict[str, list[int]]]:
    """Input ids and labels, -100 for the prompts, which are not supervised."""
    examples = []
    for line in rows.read_text().splitlines():
        row = json.loads(line)
        prompt = tokenizer(row["prompt"])["input_ids"]
        answer = [*tokenizer(row["completion"])["input_ids"], tokenizer.eos_token_id]
        labels = [-100] * len(prompt) + answer
        examples.append({"input_ids": prompt + answer, "labels": labels})
    return examples


if __name__ == "__main__":
    main()
