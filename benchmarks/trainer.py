"""One rank of transformers' Trainer, for benchmarks/against_trainer.py and benchmarks/gpu.py, which
start it.

Rows are sampled by one of Trainer's strategies and padded; padding_free joins random rows
(DataCollatorWithFlattening) under the attention of train.py's packed examples or, where flash_attn
is installed, FlashAttention 2; trl is TRL's SFTTrainer with its packing. A micro-batch has as many
rows as fit into --micro_batch_tokens on average. On a GPU the Liger kernels are used where
liger_kernel is installed. The first rank writes as JSON what was used, the peak memory, and of each
step its tokens, padding efficiency, seconds, and when it has ended.
"""

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import torch
from datasets import Dataset
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    DataCollatorWithFlattening,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.utils import is_flash_attn_2_available, is_liger_kernel_available

from zerotrain.model.packing import PACKED_EXAMPLES

STRATEGIES = ("random", "group_by_length", "batch_rebalance", "padding_free", "trl")


class Clock(TrainerCallback):
    """Seconds of each step, and when it has ended, in Unix seconds."""

    def __init__(self) -> None:
        self.began = 0.0
        self.steps: list[dict[str, float]] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.began = self.began or time.time()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.time()
        self.steps.append({"step_seconds": now - self.began, "time": now})
        self.began = now


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strategy", choices=STRATEGIES, required=True)
    for name in ("model", "tokenizer", "rows", "ds_config", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--global_batch_size", type=int, required=True)
    parser.add_argument("--micro_batch_tokens", type=int, required=True)
    parser.add_argument("--precision", choices=["fp32", "bf16"], required=True)
    args = parser.parse_args()
    if not torch.cuda.is_available():  # as in train.py: DeepSpeed would compile an all-reduce
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    trainer = make_trainer(args)
    collate = trainer.data_collator
    counts: list[tuple[int, int]] = []  # tokens without and with padding of each micro-batch

    def counting_collate(batch: list[dict]) -> Any:
        collated = collate(batch)
        counts.append((sum(len(e["input_ids"]) for e in batch), collated["input_ids"].numel()))
        return collated

    clock = Clock()
    trainer.data_collator = counting_collate
    trainer.add_callback(clock)
    trainer.train()
    arguments = trainer.args
    accumulation = arguments.gradient_accumulation_steps
    of_ranks: list[Any] = [None] * arguments.world_size
    torch.distributed.all_gather_object(of_ranks, counts)  # noqa: TID251  Trainer alone, on one machine
    for i, step in enumerate(clock.steps):
        of_step = [c[i * accumulation : (i + 1) * accumulation] for c in of_ranks]
        step["tokens"], padded = np.sum(of_step, axis=(0, 1)).tolist()
        step["padding_efficiency"] = step["tokens"] / padded
    if arguments.process_index == 0:
        attention = trainer.model.config._attn_implementation
        report = {
            "steps": clock.steps, "attention": attention, "liger": arguments.use_liger_kernel
        }  # fmt: skip
        if torch.cuda.is_available():
            report["peak_memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
        args.out.write_text(json.dumps(report))
    torch.distributed.destroy_process_group()  # or its threads may abort the exit of Python


def make_trainer(args: argparse.Namespace) -> Trainer:
    """The trainer of a strategy, with random weights."""
    on_gpu = torch.cuda.is_available()
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    examples = Dataset.from_list(read_examples(args.rows, tokenizer))
    mean_tokens = sum(map(len, examples["input_ids"])) / len(examples)
    packs = args.strategy == "trl"
    joins = args.strategy == "padding_free"
    per_rank = args.global_batch_size // int(os.environ["WORLD_SIZE"])
    fitting = max(1, int(args.micro_batch_tokens / mean_tokens))
    rows = 1 if packs else max(n for n in range(1, fitting + 1) if per_rank % n == 0)
    accumulation = per_rank // rows
    if packs:
        accumulation = max(1, round(per_rank * mean_tokens / args.micro_batch_tokens))
    options = {
        "output_dir": str(args.out.with_suffix("")),
        "deepspeed": str(args.ds_config),
        "bf16": args.precision == "bf16",
        "per_device_train_batch_size": rows,
        "gradient_accumulation_steps": accumulation,
        "num_train_epochs": 1,
        "learning_rate": 1e-4,
        "lr_scheduler_type": "constant",
        "use_cpu": not on_gpu,
        "use_liger_kernel": on_gpu and is_liger_kernel_available(),
        "report_to": "none",
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
    }
    attention = "flash_attention_2" if on_gpu and is_flash_attn_2_available() else "sdpa"
    if joins and attention == "sdpa":
        attention = PACKED_EXAMPLES
    torch.manual_seed(0)
    with torch.device("cuda" if on_gpu else "cpu"):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(args.model),
            dtype=torch.bfloat16 if options["bf16"] else torch.float32,
            attn_implementation=attention,
        )
    model.config.use_cache = False  # with a cache, attention would see other rows
    if packs:
        from trl import SFTConfig, SFTTrainer

        arguments = SFTConfig(**options, packing=True, max_length=args.micro_batch_tokens)
        return SFTTrainer(model, arguments, train_dataset=examples, processing_class=tokenizer)
    collator = DataCollatorForSeq2Seq(tokenizer, pad_to_multiple_of=8)
    if joins:
        with_bounds = attention == "flash_attention_2"
        collator = DataCollatorWithFlattening(return_flash_attn_kwargs=with_bounds)
    sampling = "random" if joins else args.strategy
    arguments = TrainingArguments(**options, train_sampling_strategy=sampling)
    return Trainer(model, arguments, train_dataset=examples, data_collator=collator)


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
