"""Compare DeepSpeed's Adam on the CPU with torch's AdamW and a plain loop, in bf16 on one rank.

    python -m benchmarks.offload MODEL_FOLDER ROWS.jsonl [--seeds 1 2 3] [--steps 100]

Three runs for each seed train all weights of a model: train.py with ds_configs/zero3_offload.json,
whose optimizer is DeepSpeed's CPU Adam; train.py with ds_configs/zero3.json, whose optimizer is
torch's AdamW; and a plain torch loop with bf16 weights and fp32 masters. The three have the same
rows, rates and first masters. A step is one row, {"question": ..., "answer": ...}. The last 16 rows
are held out. Each run has one thread.

Products of bf16 matrices are computed in fp32 and rounded once, as a GPU does it: a CPU without
bf16 instructions takes fifteen times as long for its own. The losses go to --out, a table (CSV)
with the columns step, run, loss. Runs that it has are not repeated.
"""

import json
import os
import re
import runpy
import subprocess
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import nn
from torch.func import functional_call

from zerotrain.checkpoint.masters import points_in_cells
from zerotrain.config.parse import parse_command_line
from zerotrain.model.tokenizer import load_tokenizer
from zerotrain.tools.plain_loop import train_plainly
from zerotrain.tools.records import read_metrics

RUNS = {
    "CPU Adam": "zero3_offload",
    "torch's AdamW": "zero3",
    "plain loop": "zero3",
}
HELD_OUT = 16
FLAGS = """
    --config recipes/smollm2-135m.yaml --data.max_length 256 --data.micro_batch_tokens 512
    --data.batching bucketed --model.attn_implementation eager --train.precision bf16
    --train.global_batch_size 1 --train.warmup_examples 10 --train.learning_rate 2e-5
    --train.lr_schedule linear --eval.every_steps 10000 --eval.generate 0
    --tracking.wandb disabled
"""


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder of a small pretrained model")
    parser.add_argument("rows", type=Path, help='JSONL of {"question": ..., "answer": ...}')
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=100, help="steps of each run (100)")
    parser.add_argument("--out", type=Path, default=Path("runs/offload/losses.csv"))
    args = parser.parse_args()
    work = args.out.parent
    work.mkdir(parents=True, exist_ok=True)
    lines = args.rows.read_text().splitlines(keepends=True)
    sources = []
    for name, part in (("train", lines[:-HELD_OUT]), ("held_out", lines[-HELD_OUT:])):
        file = work / f"{name}.jsonl"
        file.write_text("".join(part))
        columns = {"prompt": "question", "completion": "answer"}
        sources.append(json.dumps([{"path": str(file), "columns": columns}]))
    done = args.out.read_text() if args.out.exists() else "step,run,loss\n"
    for seed in args.seeds:
        for kind, ds_config in RUNS.items():
            run = f"{kind}, seed {seed}"
            if f'"{run}"' in done:
                continue
            folder = work / re.sub(r"\W+", "_", run)
            words = [
                sys.executable, "-m", "benchmarks.offload", f"--one={kind}", *FLAGS.split(),
                "--ds_config", f"ds_configs/{ds_config}.json", "--output_dir", folder,
                "--model.name_or_path", args.model, "--data.cache_dir", work / "cache",
                "--data.train_sources", sources[0], "--data.eval_sources", sources[1],
                "--train.steps", args.steps, "--train.seed", seed,
            ]  # fmt: skip
            environment = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": "."}
            subprocess.run([*map(str, words)], check=True, env=os.environ | environment)
            losses = read_metrics(folder)
            held_out = read_metrics(folder, "eval")
            table = [(r["step"], run, r["loss"]) for r in losses]
            table += [(r["step"], f"{run}, held out", r["eval_loss"]) for r in held_out]
            done += "".join(f'{step},"{name}",{loss}\n' for step, name, loss in table)
            args.out.write_text(done)
            print(run, *(f"{r['eval_loss']:.4f}" for r in held_out), flush=True)


class InBf16(nn.Module):
    """A model that computes in bf16. Its parameters are the masters, in fp32."""

    def __init__(self, model: nn.Module, seed: int) -> None:
        super().__init__()
        self.model = model
        model.set_attn_implementation("eager")
        for name, p in model.named_parameters():
            exact = p.data.flatten()
            values = exact.bfloat16().float()
            key = f"{seed} {name}"
            points = points_in_cells(values, exact, range(p.numel()), key, torch.bfloat16)
            p.data = points.view_as(p)

    def forward(self, **inputs: torch.Tensor) -> SimpleNamespace:
        rounded = {name: p.bfloat16() for name, p in self.model.named_parameters()}
        result = functional_call(self.model, rounded, kwargs=inputs)
        return SimpleNamespace(logits=result.logits.float())


def run_plain_loop(argv: list[str]) -> None:
    """Train a config in the plain loop, and write its losses as train.py does."""
    config = parse_command_line(argv).config
    seed = config.train.seed
    run = train_plainly(config, load_tokenizer(config.model), lambda model: InBf16(model, seed))
    steps = range(1, len(run.losses) + 1)
    records = [{"kind": "train", "step": k, "loss": run.losses[k - 1]} for k in steps]
    for step, loss in zip((0, len(steps)), run.eval_losses, strict=True):
        records.append({"kind": "eval", "step": step, "eval_loss": loss})
    folder = Path(config.output_dir)
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))


def multiply_in_fp32() -> torch.library.Library:
    """Replace torch's products of CPU matrices in this process, as long as the result is kept."""
    library = torch.library.Library("aten", "IMPL")

    def product(name: str) -> None:
        # the form with `out` is not replaced
        multiply = getattr(torch, name)

        def replacement(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            dtype = torch.float32 if a.dtype == torch.bfloat16 else a.dtype
            out = torch.empty(*a.shape[:-1], b.shape[-1], dtype=dtype)
            return multiply(a.to(dtype), b.to(dtype), out=out).to(a.dtype)

        library.impl(name, replacement, "CPU")

    product("mm")
    product("bmm")
    return library


if __name__ == "__main__":
    if sys.argv[1:] and sys.argv[1].startswith("--one="):
        kind, argv = sys.argv[1].removeprefix("--one="), sys.argv[2:]
        torch.set_num_threads(1)
        library = multiply_in_fp32()
        if kind == "plain loop":
            run_plain_loop(argv)
        else:
            sys.argv = ["train.py", *argv]
            runpy.run_path("train.py", run_name="__main__")
    else:
        main()
