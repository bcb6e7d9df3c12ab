"""Train with transformers' Trainer on one device, for benchmarks/gpu.py, which starts it.

Rows are batched without padding (DataCollatorWithFlattening), or padded with rows of similar
length. Attention is FlashAttention 2 where flash_attn is installed, else SDPA; the Liger kernels
are used where liger_kernel is installed. Writes as JSON which of them were used, the peak memory,
and of each step its tokens and when it has ended.
"""

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import deepspeed
import torch
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

from benchmarks.against_trainer import read_examples

BATCHINGS = ("padding_free", "group_by_length")


class Clock(TrainerCallback):
    """When each step has ended, Unix seconds."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.times.append(time.time())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batching", choices=BATCHINGS, required=True)
    parser.add_argument("--model", type=Path, required=True, help="folder with config.json")
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--rows", type=Path, required=True, help="prompts and completions, .jsonl")
    parser.add_argument("--ds_config", type=Path, required=True)
    parser.add_argument("--global_batch_size", type=int, required=True)
    parser.add_argument("--micro_batch_size", type=int, required=True, help="rows")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}  # any free port
    on_gpu = torch.cuda.is_available()
    attention = "flash_attention_2" if is_flash_attn_2_available() else "sdpa"
    if not on_gpu:  # as in train.py: DeepSpeed would compile a shared-memory all-reduce
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    if args.batching == "padding_free":
        with_bounds = attention == "flash_attention_2"
        collator = DataCollatorWithFlattening(return_flash_attn_kwargs=with_bounds)
    else:
        collator = DataCollatorForSeq2Seq(tokenizer, pad_to_multiple_of=8)
    micro_batch_tokens: list[int] = []

    def collate(batch: list[dict]) -> Any:
        micro_batch_tokens.append(sum(len(example["input_ids"]) for example in batch))
        return collator(batch)

    accumulation = args.global_batch_size // args.micro_batch_size
    arguments = TrainingArguments(
        str(args.out.with_suffix("")),
        deepspeed=str(args.ds_config),
        bf16=on_gpu,
        per_device_train_batch_size=args.micro_batch_size,
        gradient_accumulation_steps=accumulation,
        num_train_epochs=1,
        learning_rate=1e-4,
        train_sampling_strategy="random" if args.batching == "padding_free" else args.batching,
        use_liger_kernel=is_liger_kernel_available(),
        use_cpu=not on_gpu,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )
    with torch.device("cuda" if on_gpu else "cpu"):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(args.model),
            dtype=torch.bfloat16 if on_gpu else torch.float32,
            attn_implementation=attention,
        )
    model.config.use_cache = False  # with a cache, SDPA would attend across rows
    clock = Clock()
    examples = read_examples(args.rows, tokenizer)
    Trainer(
        model, arguments, train_dataset=examples, data_collator=collate, callbacks=[clock]
    ).train()
    tokens = [
        sum(micro_batch_tokens[i : i + accumulation])
        for i in range(0, len(micro_batch_tokens), accumulation)
    ]
    report = {
        "attention": attention,
        "liger": is_liger_kernel_available(),
        "steps": [{"time": at, "tokens": n} for at, n in zip(clock.times, tokens, strict=True)],
    }
    if on_gpu:
        report["peak_memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
    args.out.write_text(json.dumps(report))


if __name__ == "__main__":
    main()
