"""Train with transformers' Trainer without padding, on one rank, for benchmarks/gpu.py.

    torchrun --nproc_per_node 1 -m benchmarks.trainer --config FILE [--section.key value ...]

The flags and the work are train.py's. Trainer joins random rows (DataCollatorWithFlattening). A
micro-batch has as many rows as fit into micro_batch_tokens on average. On a GPU, attention is one
call of train.py's varlen kernel, without a mask, and Liger kernels are used: install liger_kernel.
model.compile becomes Trainer's torch_compile. OUTPUT_DIR.json gets the number of micro-steps, the
peak memory, and the tokens, seconds and end of each step.
"""

import json
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import torch
from datasets import Dataset
from torch import nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorWithFlattening,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from zerotrain.config.parse import parse_command_line
from zerotrain.config.schema import Config
from zerotrain.model import packing
from zerotrain.model.packing import PACKED_EXAMPLES, Examples
from zerotrain.runtime.machine import GIB

VARLEN = "varlen"


class Clock(TrainerCallback):
    """Records in Unix seconds when the first step began and when each step ended."""

    def __init__(self) -> None:
        self.times = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.times = self.times or [time.time()]

    def on_step_end(self, *_: Any, **__: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.times.append(time.time())


class CountingCollator(DataCollatorWithFlattening):
    """Joins rows, and records the tokens of each micro-batch."""

    def __init__(self) -> None:
        super().__init__(return_flash_attn_kwargs=torch.cuda.is_available())
        self.tokens = []

    def __call__(self, rows: list[dict[str, Any]], *args: Any, **options: Any) -> dict[str, Any]:
        self.tokens.append(sum(len(row["input_ids"]) for row in rows))
        return super().__call__(rows, *args, **options)


@torch.compiler.disable  # the lengths differ in every micro-batch
def varlen_attention(
    module: nn.Module,
    *states: torch.Tensor,
    cu_seq_lens_q: torch.Tensor,
    max_length_q: int,
    scaling: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Compute causal attention within the rows that DataCollatorWithFlattening has joined."""
    query, key, value, _ = states  # and a mask, which is None
    rows = Examples((int(max_length_q),), cu_seq_lens_q.int(), None)
    return packing.varlen_attention(query, key, value, rows, scaling), None


def main() -> None:
    config = parse_command_line(sys.argv[1:]).config
    if not torch.cuda.is_available():
        deepspeed.ops.__compatible_ops__ = {}  # It would compile an all-reduce otherwise.
    trainer = make_trainer(config)
    clock = Clock()
    trainer.add_callback(clock)
    trainer.train()
    arguments = trainer.args
    tokens = trainer.data_collator.tokens
    first_of_step = range(0, len(tokens), arguments.gradient_accumulation_steps)
    tokens_of_steps = np.add.reduceat(tokens, first_of_step).tolist()
    report = {
        "micro_steps": len(tokens),
        "steps": [
            {"step_seconds": ended - began, "time": ended, "tokens": count}
            for (began, ended), count in zip(pairwise(clock.times), tokens_of_steps, strict=True)
        ],
    }
    if torch.cuda.is_available():
        report["peak_memory_gib"] = torch.cuda.max_memory_allocated() / GIB
    Path(config.output_dir).with_suffix(".json").write_text(json.dumps(report))
    torch.distributed.destroy_process_group()  # Its threads could abort Python's exit.


def make_trainer(config: Config) -> Trainer:
    """Return a Trainer of the config's model with random weights."""
    on_gpu = torch.cuda.is_available()
    tokenizer = AutoTokenizer.from_pretrained(config.model.tokenizer)
    examples = Dataset.from_list(read_examples(Path(config.data.train_sources[0].path), tokenizer))
    mean_tokens = sum(map(len, examples["input_ids"])) / len(examples)
    batch = config.train.global_batch_size
    fitting = max(1, int(config.data.micro_batch_tokens / mean_tokens))
    rows = max(n for n in range(1, fitting + 1) if batch % n == 0)
    arguments = TrainingArguments(
        output_dir=config.output_dir,
        deepspeed=config.ds_config,
        bf16=config.train.precision == "bf16",
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=batch // rows,
        num_train_epochs=1,
        learning_rate=1e-4,
        lr_scheduler_type="constant",
        use_cpu=not on_gpu,
        torch_compile=config.model.compile,
        use_liger_kernel=on_gpu,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )
    if on_gpu:
        AttentionInterface.register(VARLEN, varlen_attention)
        AttentionMaskInterface.register(VARLEN, lambda **_: None)
    if on_gpu and config.model.compile:
        from liger_kernel.transformers import functional

        # Compiled, Liger 0.8.5's loss takes minutes, and is wrong where labels are -100
        # (https://github.com/linkedin/Liger-Kernel/pull/1338).
        loss = torch.compiler.disable(functional.liger_fused_linear_cross_entropy)
        functional.liger_fused_linear_cross_entropy = loss
    torch.manual_seed(0)
    with torch.device("cuda" if on_gpu else "cpu"):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(config.model.name_or_path),
            dtype=torch.bfloat16 if arguments.bf16 else torch.float32,
            attn_implementation=VARLEN if on_gpu else PACKED_EXAMPLES,
        )
    model.config.use_cache = False  # A cache would make rows attend to each other.
    return Trainer(model, arguments, train_dataset=examples, data_collator=CountingCollator())


def read_examples(rows: Path, tokenizer: Any) -> list[dict[str, list[int]]]:
    """Return token ids and labels. The labels of prompts are -100, so they carry no loss."""
    examples = []
    for line in rows.read_text().splitlines():
        row = json.loads(line)
        prompt = tokenizer(row["prompt"])["input_ids"]
        answer = [*tokenizer(row["completion"])["input_ids"], tokenizer.eos_token_id]
        examples.append({"input_ids": prompt + answer, "labels": [-100] * len(prompt) + answer})
    return examples


if __name__ == "__main__":
    main()
