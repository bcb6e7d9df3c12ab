"""Compare train.py with transformers' Trainer on the same work, in processes that alternate.

    python benchmarks/against_trainer.py [--rows 512] [--repeats 5] [--lengths LENGTHS.npy] ...

Each side trains one epoch of the same rows, whose prompts are not supervised, under the same
ds_config: the same model from random weights, global batch and precision. Trainer pads, with each
of its sampling strategies in turn, and has as many rows in a micro-batch as fit into
--micro_batch_tokens on average. Tokens are counted without padding, seconds from the end of the
second step to the end of the last one. The result is the median over --repeats of the ratio of
train.py's tokens/s to Trainer's in the same repeat, with the smallest and largest one.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

REPO = Path(__file__).resolve().parent.parent
TOKENIZER = REPO / "data" / "sample" / "model"
STRATEGIES = ("random", "group_by_length", "batch_rebalance")
WARM_UP_STEPS = 2


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--lengths", type=Path, help="int .npy; default: log-normal, mean 270")
    parser.add_argument("--max_length", type=int, default=1024)
    parser.add_argument("--global_batch_size", type=int, default=64)
    parser.add_argument("--micro_batch_tokens", type=int, default=2048)
    parser.add_argument("--hidden_size", type=int, default=256)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--zero", type=int, default=2, help="ZeRO stage")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--strategies", default=",".join(STRATEGIES))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--trainer", help=argparse.SUPPRESS)  # in a rank of Trainer: the strategy
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.trainer:
        run_trainer(args)
        return
    with tempfile.TemporaryDirectory() as folder:
        args.folder = Path(folder)
        write_inputs(args)
        print(json.dumps(compare(args), indent=2))


def write_inputs(args: argparse.Namespace) -> None:
    """The rows, the model's config.json and the ds_config that both sides read."""
    from transformers import AutoTokenizer, LlamaConfig

    rng = np.random.default_rng(0)
    given = np.load(args.lengths) if args.lengths else rng.lognormal(4.97, 1.12, 50_000)
    lengths = np.clip(rng.choice(given, args.rows), 8, args.max_length).astype(int)
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    words = [chr(c) for c in range(ord("a"), ord("z") + 1)]  # one token each
    with (args.folder / "rows.jsonl").open("w") as file:
        for length in lengths:
            text = "".join(rng.choice(words, length - 1))
            row = {"prompt": text[: length // 2], "completion": text[length // 2 :]}
            file.write(json.dumps(row) + "\n")
    LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=len(tokenizer),
        hidden_size=args.hidden_size,
        intermediate_size=4 * args.hidden_size,
        num_hidden_layers=args.layers,
        num_attention_heads=max(1, args.hidden_size // 64),
        max_position_embeddings=args.max_length,
    ).save_pretrained(args.folder / "model")
    tokenizer.save_pretrained(args.folder / "model")
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


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """Run all sides in turn, --repeats times."""
    sides = ["train.py", *args.strategies.split(",")]
    runs: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    for repeat in range(args.repeats):
        for side in sides:
            began = time.perf_counter()
            steps = run_ours(args, repeat) if side == "train.py" else start_trainer(args, side)
            timed = steps[WARM_UP_STEPS:]
            rate = sum(s["tokens"] for s in timed) / sum(s["step_seconds"] for s in timed)
            seconds = time.perf_counter() - began
            runs[side].append({"tokens_per_s": rate, "seconds": seconds, "steps": len(steps)})
            print(f"{side}: {rate:,.0f} tokens/s, {seconds:.0f} s in all", file=sys.stderr)
    report: dict[str, Any] = {}
    for side in sides:
        report[side] = {
            key: round(statistics.median(run[key] for run in runs[side]), 1)
            for key in ("tokens_per_s", "seconds", "steps")
        }
        ratios = [
            ours["tokens_per_s"] / theirs["tokens_per_s"]
            for ours, theirs in zip(runs["train.py"], runs[side], strict=True)
        ]
        report[side]["train.py over this"] = [
            round(value, 2) for value in (statistics.median(ratios), min(ratios), max(ratios))
        ]
    return report


def launch(args: argparse.Namespace, *command: object) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launcher = [Path(sys.executable).with_name("deepspeed"), "--num_gpus", args.ranks]
    log = args.folder / "log.txt"
    with log.open("w") as output:
        done = subprocess.run(
            [str(word) for word in (*launcher, "--master_port", port, *command)],
            cwd=REPO, stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip
    if done.returncode:
        sys.exit(f"{log.read_text()[-4000:]}\nended with exit code {done.returncode}")


def run_ours(args: argparse.Namespace, repeat: int) -> list[dict[str, Any]]:
    """The step records of train.py."""
    run = args.folder / f"run_{repeat}"
    config = {
        "output_dir": str(run),
        "ds_config": str(args.folder / "ds_config.json"),
        "model": {"name_or_path": str(args.folder / "model"), "from_config": True},
        "data": {
            "train_sources": [str(args.folder / "rows.jsonl")],
            "max_length": args.max_length,
            "micro_batch_tokens": args.micro_batch_tokens,
            "cache_dir": str(args.folder / "cache"),
        },
        "train": {
            "global_batch_size": args.global_batch_size,
            "epochs": 1,
            "learning_rate": 1e-4,
            "lr_schedule": "constant",
            "precision": args.precision,
        },
        "tracking": {"wandb": "disabled"},
    }
    file = args.folder / "config.yaml"
    file.write_text(json.dumps(config))  # JSON is YAML
    launch(args, "train.py", "--config", file)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == "train"]


def start_trainer(args: argparse.Namespace, strategy: str) -> list[dict[str, Any]]:
    """The step records of Trainer with a sampling strategy."""
    options = ("rows", "max_length", "global_batch_size", "micro_batch_tokens", "precision")
    flags = [f"--{name}={getattr(args, name)}" for name in options]
    launch(args, Path(__file__), "--trainer", strategy, "--folder", args.folder, *flags)
    return json.loads((args.folder / "trainer.json").read_text())


def run_trainer(args: argparse.Namespace) -> None:
    """One rank of Trainer; the first one writes the step records."""
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

    # as in train.py: on CPU DeepSpeed would compile a shared-memory all-reduce
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    world_size = int(os.environ["WORLD_SIZE"])
    tokenizer = AutoTokenizer.from_pretrained(args.folder / "model")
    examples = []
    for line in (args.folder / "rows.jsonl").read_text().splitlines():
        row = json.loads(line)
        prompt = tokenizer(row["prompt"])["input_ids"]
        answer = [*tokenizer(row["completion"])["input_ids"], tokenizer.eos_token_id]
        labels = [-100] * len(prompt) + answer
        examples.append({"input_ids": prompt + answer, "labels": labels})
    mean = sum(len(e["input_ids"]) for e in examples) / len(examples)
    per_rank = args.global_batch_size // world_size
    fitting = max(1, int(args.micro_batch_tokens / mean))
    rows = max(n for n in range(1, fitting + 1) if per_rank % n == 0)
    collator = DataCollatorForSeq2Seq(tokenizer, pad_to_multiple_of=8)
    step_tokens: list[int] = []
    seconds: list[float] = []

    def collate(batch: list[dict]) -> Any:
        step_tokens.append(sum(len(e["input_ids"]) for e in batch))
        return collator(batch)

    class Clock(TrainerCallback):
        began = 0.0

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.began = self.began or time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            now = time.perf_counter()
            seconds.append(now - self.began)
            self.began = now

    arguments = TrainingArguments(
        str(args.folder / "trainer"),
        deepspeed=str(args.folder / "ds_config.json"),
        bf16=args.precision == "bf16",
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=per_rank // rows,
        num_train_epochs=1,
        learning_rate=1e-4,
        lr_scheduler_type="constant",
        train_sampling_strategy=args.trainer,
        use_cpu=not torch.cuda.is_available(),
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(args.folder / "model"),
        dtype=torch.bfloat16 if arguments.bf16 else torch.float32,
    )
    Trainer(
        model, arguments, train_dataset=examples, data_collator=collate, callbacks=[Clock()]
    ).train()
    # the tokens of this rank times the ranks: equal on average
    accumulation = per_rank // rows
    batches = [
        sum(step_tokens[i : i + accumulation]) * world_size
        for i in range(0, len(step_tokens), accumulation)
    ]
    steps = [
        {"tokens": tokens, "step_seconds": taken}
        for tokens, taken in zip(batches, seconds, strict=False)
    ]
    if arguments.process_index == 0:
        (args.folder / "trainer.json").write_text(json.dumps(steps))


if __name__ == "__main__":
    main()
