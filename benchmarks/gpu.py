"""Check one GPU: does everything run on it, how exactly, and how fast?

    python benchmarks/gpu.py --out FOLDER [--minutes 9] [--only NAME,...] [--continue] [--toy]

Runs the CHECKS below in order, each in processes of its own. A check that fails does not stop the
others. After each one FOLDER/results.json is written again. When --minutes are over, what runs is
stopped, and --continue runs what has no result yet. Needs about 10 GB of disk and no network. --toy
runs every check at toy size on CPU, to test this file; its figures mean nothing.

Exit code: 0 all checks that were asked for passed, 1 otherwise.
"""

import argparse
import json
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

REPO = Path(__file__).resolve().parent.parent
TOKENIZER = REPO / "data" / "sample" / "model"
SHAPES = {  # Qwen2.5-0.5B and 1.5B, Llama-3.1-8B
    "0.5b": {
        "model_type": "qwen2", "vocab_size": 151_936, "hidden_size": 896,
        "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
        "num_key_value_heads": 2, "tie_word_embeddings": True,
    },
    "1.5b": {
        "model_type": "qwen2", "vocab_size": 151_936, "hidden_size": 1536,
        "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12,
        "num_key_value_heads": 2, "tie_word_embeddings": True,
    },
    "8b": {
        "model_type": "llama", "vocab_size": 128_256, "hidden_size": 4096,
        "intermediate_size": 14_336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "tie_word_embeddings": False,
    },
}  # fmt: skip
TOY_SHAPE = {
    "vocab_size": 384, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1,
}  # fmt: skip
WARM_UP_STEPS = 2
TAIL_CHARACTERS = 3000


class CheckFailed(Exception):
    """A check has found a problem; its text says which."""


class OutOfTime(Exception):
    """--minutes are over."""


@dataclass
class Bench:
    """Where the checks run, and until when."""

    folder: Path
    toy: bool
    end: float
    """time.monotonic() when --minutes are over."""
    runs: int = field(default=0)

    def command(self, *words: object) -> str:
        """The output of a command; kills it with all that it has started when time is over."""
        command = [str(word) for word in words]
        process = subprocess.Popen(
            command, cwd=REPO, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            start_new_session=True,
        )  # fmt: skip
        try:
            output, _ = process.communicate(timeout=max(0, self.end - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise OutOfTime from None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if process.returncode:
            tail = output[-TAIL_CHARACTERS:]
            raise CheckFailed(f"exit code {process.returncode}: {' '.join(command[:4])}\n{tail}")
        return output

    def model(self, shape: str, max_length: int) -> Path:
        """A folder with the config.json of a shape; weights are random."""
        folder = self.folder / f"model_{shape}_{max_length}"
        if not folder.is_dir():
            folder.mkdir()
            sizes = SHAPES[shape] | (TOY_SHAPE if self.toy else {})
            config = sizes | {"max_position_embeddings": max_length, "eos_token_id": 1}
            (folder / "config.json").write_text(json.dumps(config))
        return folder

    def rows(self, max_length: int) -> Path:
        """Rows of log-normal lengths, mean 500 tokens; the prompt is not supervised."""
        file = self.folder / f"rows_{max_length}.jsonl"
        if not file.is_file():
            rng = np.random.default_rng(0)
            lengths = rng.lognormal(5.87, 0.82, 200 if self.toy else 4000)
            letters = list("abcdefghijklmnopqrstuvwxyz")  # one token each
            with file.open("w") as out:
                for length in np.clip(lengths, 8, max_length - 2).astype(int):
                    text = "".join(rng.choice(letters, length))
                    row = {"prompt": text[: length // 4], "completion": text[length // 4 :]}
                    out.write(json.dumps(row) + "\n")
        return file

    def train(self, shape: str = "0.5b", steps: int = 8, **flags: object) -> list[dict[str, Any]]:
        """The step records of a run of train.py; `section__key` is --section.key.

        Args:
            flags: micro_batch_tokens, the longest row and a quarter of the global batch; and any
                key of the run config.
        """
        self.runs += 1
        longest = 256 if self.toy else int(flags.pop("micro_batch_tokens", 4096))
        flags.pop("micro_batch_tokens", None)
        run = Path(str(flags.pop("output_dir", self.folder / f"run_{self.runs}")))
        config = self.folder / f"run_{self.runs}.yaml"
        config.write_text(f"output_dir: {run}\n")
        given = {
            "ds_config": "ds_configs/zero1.json",
            "model__name_or_path": self.model(shape, longest),
            "model__from_config": True,
            "model__tokenizer": TOKENIZER,
            "data__train_sources": f"[{self.rows(longest)}]",
            "data__cache_dir": self.folder / "cache",
            "data__max_length": longest,
            "data__micro_batch_tokens": longest,
            "train__global_batch_tokens": 4 * longest,
            "train__steps": min(steps, 4) if self.toy else steps,
            "train__learning_rate": 1e-4,
            "train__precision": "fp32" if self.toy else "bf16",
            "tracking__wandb": "disabled",
            **flags,
        }
        words = [
            f"--{key.replace('__', '.')}={json.dumps(value) if isinstance(value, bool) else value}"
            for key, value in given.items()
        ]
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        launcher = [Path(sys.executable).with_name("deepspeed"), "--num_gpus", 1]
        if not launcher[0].exists():  # packages installed into a folder have no commands
            launcher = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", 1]
        self.command(*launcher, "--master_port", port, "train.py", "--config", config, *words)
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        return [line for line in lines if line["kind"] == "train"]


def check_environment(bench: Bench) -> dict[str, Any]:
    """Versions, and the rate of a bf16 product of two 8,192 x 8,192 matrices."""
    script = """
import json, time, torch, deepspeed, transformers
cuda = torch.cuda.is_available()
size, dtype = (8192, torch.bfloat16) if cuda else (256, torch.float32)
a, b = (torch.randn(size, size, dtype=dtype, device="cuda" if cuda else "cpu") for _ in range(2))
for repeats in (3, 30):
    began = time.perf_counter()
    for _ in range(repeats):
        a @ b
    if cuda:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - began
print(json.dumps({
    "device": torch.cuda.get_device_name() if cuda else "cpu", "torch": torch.__version__,
    "cuda": torch.version.cuda, "deepspeed": deepspeed.__version__,
    "transformers": transformers.__version__,
    "matmul_tflops_per_s": 2 * size**3 * repeats / seconds / 1e12,
}))
"""
    return json.loads(bench.command(sys.executable, "-c", script).splitlines()[-1])


def check_tests(bench: Bench) -> dict[str, Any]:
    """pytest -m gpu: the varlen kernel, NCCL and the loss against the CPU's."""
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-m", "gpu", "tests"]
    return {"pytest": bench.command(*command).splitlines()[-1]}


def check_ds_configs(bench: Bench) -> dict[str, Any]:
    """Every file of ds_configs/: the same losses as the first one, within 2 %."""
    losses = {}
    for file in sorted((REPO / "ds_configs").glob("*.json")):
        steps = bench.train(steps=6, ds_config=file.relative_to(REPO))
        losses[file.stem] = [step["loss"] for step in steps]
    expect_equal(losses, 0.02)
    return {name: values[-1] for name, values in losses.items()}


def check_packed(bench: Bench) -> dict[str, Any]:
    """Packed and bucketed examples: the same losses, within 2 %."""
    runs = {mode: bench.train(data__batching=mode) for mode in ("packed", "bucketed")}
    expect_equal({mode: [s["loss"] for s in steps] for mode, steps in runs.items()}, 0.02)
    return {mode: figures_of(steps) for mode, steps in runs.items()}


def check_lora(bench: Bench) -> dict[str, Any]:
    """LoRA under ZeRO 1 and 3, the same losses within 2 %; and on weights in 4 bits on a GPU."""
    options: dict[str, object] = {"model__lora__r": 16, "model__activation_checkpointing": True}
    runs = {
        f"zero{stage}": bench.train(ds_config=f"ds_configs/zero{stage}.json", **options)
        for stage in (1, 3)
    }
    expect_equal({name: [s["loss"] for s in steps] for name, steps in runs.items()}, 0.02)
    return {name: figures_of(steps) for name, steps in runs.items()}


def check_resume(bench: Bench) -> dict[str, Any]:
    """A run that is stopped after four steps and resumed: the losses of one that is not."""
    whole = bench.train(steps=4 if bench.toy else 8)
    run = bench.folder / "resumed"
    total = {"output_dir": run, "checkpoint__every_steps": 2, "checkpoint__async_save": True}
    run.mkdir()
    (run / "stop").touch()  # seen after the first step
    bench.train(steps=4 if bench.toy else 8, **total)
    resumed = bench.train(steps=4 if bench.toy else 8, **total)
    losses = {"whole": [s["loss"] for s in whole], "resumed": [s["loss"] for s in resumed]}
    expect_equal(losses, 0.02)
    return {name: values[-1] for name, values in losses.items()}


def dense(shape: str, length: int, stage: int, **flags: object) -> Callable[[Bench], dict]:
    def check(bench: Bench) -> dict[str, Any]:
        ds_config = f"ds_configs/zero{stage}.json"
        options = {"ds_config": ds_config, "micro_batch_tokens": length, **flags}
        return figures_of(bench.train(shape, 10, **options))

    return check


CHECKS: dict[str, Callable[[Bench], dict[str, Any]]] = {
    "environment": check_environment,
    "tests": check_tests,
    "dense_0.5b_4k": dense("0.5b", 4096, 1),
    "dense_1.5b_8k": dense("1.5b", 8192, 1),
    "dense_1.5b_32k": dense("1.5b", 32_768, 2, model__activation_checkpointing=True),
    "dense_8b_4k": dense("8b", 4096, 3, model__activation_checkpointing=True),
    "ds_configs": check_ds_configs,
    "packed": check_packed,
    "lora": check_lora,
    "resume": check_resume,
}


def figures_of(steps: list[dict[str, Any]]) -> dict[str, float]:
    """Rates over the steps after the warm-up, and the peak memory."""
    timed = steps[WARM_UP_STEPS:]
    seconds = sum(step["step_seconds"] for step in timed)
    flops = sum(step["model_flops_per_s"] * step["step_seconds"] for step in timed)
    return {
        "tokens_per_s": sum(step["tokens"] for step in timed) / seconds,
        "model_tflops_per_s": flops / seconds / 1e12,
        "peak_memory_gib": steps[-1].get("memory_peak_gib", 0.0),
        "last_loss": steps[-1]["loss"],
    }


def expect_equal(losses: dict[str, list[float]], tolerance: float) -> None:
    """Raise CheckFailed unless all runs have the losses of the first one."""
    (first, expected), *others = losses.items()
    for name, found in others:
        pairs = zip(expected, found, strict=True)
        if not all(math.isclose(a, b, rel_tol=tolerance) for a, b in pairs):
            raise CheckFailed(f"losses of {name} {found} differ from those of {first} {expected}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of results.json")
    parser.add_argument("--minutes", type=float, default=9, help="for all checks together")
    parser.add_argument("--only", help=f"of {', '.join(CHECKS)}")
    parser.add_argument("--continue", action="store_true", dest="resume")
    parser.add_argument("--toy", action="store_true", help="toy sizes, on CPU")
    args = parser.parse_args()
    wanted = args.only.split(",") if args.only else list(CHECKS)
    if unknown := sorted(set(wanted) - set(CHECKS)):
        parser.error(f"--only: no check is named {unknown[0]}; there are {', '.join(CHECKS)}")
    file = args.out / "results.json"
    results = {}
    if (args.resume or args.only) and file.is_file():
        results = json.loads(file.read_text())
    if args.resume:
        wanted = [name for name in wanted if name not in results]
    args.out.mkdir(parents=True, exist_ok=True)
    os.environ |= {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled"}
    if args.toy:
        os.environ |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with tempfile.TemporaryDirectory(prefix="gpu_checks_") as folder:
        bench = Bench(Path(folder), args.toy, time.monotonic() + 60 * args.minutes)
        for name in wanted:
            began = time.monotonic()
            try:
                result: dict[str, Any] = {"passed": True, "figures": CHECKS[name](bench)}
            except CheckFailed as problem:
                result = {"passed": False, "problem": str(problem)}
            except OutOfTime:
                print(f"no time was left for {name}: run it again with --continue")
                break
            results[name] = {**result, "seconds": round(time.monotonic() - began, 1)}
            print(f"{name}: {json.dumps(results[name], indent=1)}", flush=True)
            file.write_text(json.dumps(results, indent=1) + "\n")
    sys.exit(0 if all(results.get(name, {}).get("passed") for name in wanted) else 1)


if __name__ == "__main__":
    main()
