"""One rank of transformers' Trainer, for benchmarks/against_trainer.py and benchmarks/gpu.py.

    python -m benchmarks.trainer STRATEGY --config FILE [--section.key value ...]

Rows are sampled by one of Trainer's strategies and padded; padding_free joins random rows
(DataCollatorWithFlattening) under the attention of train.py's packed examples. A micro-batch has
as many rows as fit into micro_batch_tokens on average. On a GPU the Liger kernels are used where
liger_kernel is installed. Options are those of train.py, for the same work. The first rank writes
into OUTPUT_DIR.json what was used, the peak memory, and of each step its tokens, padding
efficiency, seconds, and when it has ended.
"""

import json
import os
import sys
import time
from itertools import pairwise
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
from transformers.utils import is_liger_kernel_available

from zerotrain.config.parse import parse_command_line
from zerotrain.config.schema import Config
from zerotrain.model.packing import PACKED_EXAMPLES


class Clock(TrainerCallback):
    """When the first step has begun, and each step has ended, in Unix seconds."""

    def __init__(self) -> None:
        self.times = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.times = self.times or [time.time()]

    def on_step_end(self, *_: Any, **__: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.times.append(time.time())


def main() -> None:
    strategy, *options = sys.argv[1:]
    config = parse_command_line(options).config
    if not torch.cuda.is_available():  # as in train.py: DeepSpeed would compile an all-reduce
        deepspeed.ops.__compatible_ops__ = {}
    trainer = make_trainer(config, strategy)
    collate = trainer.data_collator
    counts = []  # tokens without and with padding of each micro-batch

    def counting_collate(batch: list[dict]) -> Any:
        collated = collate(batch)
        counts.append((sum(len(e["input_ids"]) for e in batch), collated["input_ids"].numel()))
        return collated

    clock = Clock()
    trainer.data_collator = counting_collate
    trainer.add_callback(clock)
    trainer.train()
    arguments = trainer.args
    of_ranks = trainer.accelerator.reduce(torch.tensor(counts, device=arguments.device)).cpu()
    starts = range(0, len(counts), arguments.gradient_accumulation_steps)
    of_steps = np.add.reduceat(of_ranks.numpy(), starts).tolist()
    steps = [
        {
            "step_seconds": ended - began, "time": ended,
            "tokens": tokens, "padding_efficiency": tokens / padded,
        }
        for (began, ended), (tokens, padded) in zip(pairwise(clock.times), of_steps, strict=True)
    ]  # fmt: skip
    if arguments.process_index == 0:
        attention = trainer.model.config._attn_implementation
        report = {
            "steps": steps, "attention": attention, "liger": arguments.use_liger_kernel
        }  # fmt: skip
        if torch.cuda.is_available():
            report["peak_memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
        Path(config.output_dir).with_suffix(".json").write_text(json.dumps(report))
    torch.distributed.destroy_process_group()  # or its threads may abort the exit of Python


def make_trainer(config: Config, strategy: str) -> Trainer:
    """The trainer of a strategy, with random weights."""
    on_gpu = torch.cuda.is_available()
    tokenizer = AutoTokenizer.from_pretrained(config.model.tokenizer)
    examples = Dataset.from_list(read_examples(Path(config.data.train_sources[0].path), tokenizer))
    mean_tokens = sum(map(len, examples["input_ids"])) / len(examples)
    joins = strategy == "padding_free"
    per_rank = config.train.global_batch_size // int(os.environ["WORLD_SIZE"])
    fitting = max(1, int(config.data.micro_batch_tokens / mean_tokens))
    rows = max(n for n in range(1, fitting + 1) if per_rank % n == 0)
    arguments = TrainingArguments(
        output_dir=config.output_dir,
        deepspeed=config.ds_config,
        bf16=config.train.precision == "bf16",
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=per_rank // rows,
        num_train_epochs=1,
        learning_rate=1e-4,
        lr_scheduler_type="constant",
        train_sampling_strategy="random" if joins else strategy,
        use_cpu=not on_gpu,
        use_liger_kernel=on_gpu and is_liger_kernel_available(),
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )
    torch.manual_seed(0)
    with torch.device("cuda" if on_gpu else "cpu"):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(config.model.name_or_path),
            dtype=torch.bfloat16 if arguments.bf16 else torch.float32,
            attn_implementation=PACKED_EXAMPLES if joins else "sdpa",
        )
    model.config.use_cache = False  # with a cache, attention would see other rows
    collator = DataCollatorForSeq2Seq(tokenizer, pad_to_multiple_of=8)
    if joins:
        collator = DataCollatorWithFlattening()
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
