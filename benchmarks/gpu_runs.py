"""Start runs of train.py at given sizes, with random weights and rows, and read what they measure;
for benchmarks/gpu.py.
"""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

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
# All weights of the 8B shape trained take 18 bytes each, more than one GPU of 141 GB has.
SHAPES["8b_16_layers"] = SHAPES["8b"] | {"num_hidden_layers": 16}
TOY_SHAPE = {
    "vocab_size": 384, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1,
}  # fmt: skip
WITH_WEIGHTS = "0.5b"
SAVE_WEIGHTS = """
import sys, torch
from transformers import AutoConfig, AutoModelForCausalLM
config = AutoConfig.from_pretrained(sys.argv[1])
torch.manual_seed(0)
AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(sys.argv[1])
"""
MEAN_LENGTH = 500  # tokens of a row
WARM_UP_STEPS = 3
Figures = dict[str, Any]


class CheckFailed(Exception):
    """A check has found a problem; its text says which."""


class OutOfTime(Exception):
    """--minutes are over."""


class Run(NamedTuple):
    """What train.py has written."""

    folder: Path
    steps: list[dict[str, Any]]
    states_gib: float
    """The model states of a rank, by arithmetic."""


@dataclass
class Bench:
    """Where the checks run, and until when."""

    folder: Path
    toy: bool
    end: float
    """time.monotonic() when --minutes are over."""
    matmul_tflops_per_s: float = 0.0
    """Measured first, in the same run."""
    runs: int = field(default=0)

    def command(self, *words: object, until: Callable[[], bool] = lambda: False) -> str:
        """The output of a command of Python's. It is killed, with all that it has started, as soon
        as `until` is true, and when time is over.
        """
        paths = {
            "PYTHONPATH": os.pathsep.join(filter(None, [str(REPO), os.environ.get("PYTHONPATH")])),
            # a killed compilation leaves a lock, for which later ones would wait for ever
            "TORCH_EXTENSIONS_DIR": str(self.folder / "extensions"),
        }
        log = self.folder / "log.txt"
        with log.open("w") as output:
            process = subprocess.Popen(
                [sys.executable, *map(str, words)], cwd=REPO, stdout=output,
                stderr=subprocess.STDOUT, env={**os.environ, **paths},
                start_new_session=True,
            )  # fmt: skip
        try:
            while process.poll() is None and not until():
                if time.monotonic() > self.end:
                    raise OutOfTime
                time.sleep(0.1)
        finally:
            is_killed = process.poll() is None
            if is_killed:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        text = log.read_text(errors="replace")
        if process.returncode and not is_killed:
            raise CheckFailed(f"{words[0]}, exit code {process.returncode}: {text[-3000:]}")
        return text

    def model(self, shape: str, max_length: int) -> Path:
        """A folder with the config.json of a shape. The 0.5B shape also has weights there: random
        ones that are drawn by a run differ between ZeRO 3 and the other stages.
        """
        folder = self.folder / f"model_{shape}_{max_length}"
        if not folder.is_dir():
            folder.mkdir()
            sizes = SHAPES[shape] | (TOY_SHAPE if self.toy else {})
            config = sizes | {"max_position_embeddings": max_length, "eos_token_id": 1}
            (folder / "config.json").write_text(json.dumps(config))
            if shape == WITH_WEIGHTS:
                self.command("-c", SAVE_WEIGHTS, folder)
        return folder

    def rows(self, max_length: int, count: int = 4000) -> Path:
        """Rows of log-normal lengths, a few of them 20 times the mean; the prompt is not
        supervised.
        """
        file = self.folder / f"rows_{max_length}_{count}.jsonl"
        if not file.is_file():
            rng = np.random.default_rng(0)
            mean, spread = self.fit(MEAN_LENGTH, 60), 1.12
            lengths = rng.lognormal(math.log(mean) - spread**2 / 2, spread, count)
            letters = list("abcdefghijklmnopqrstuvwxyz")  # one token each
            with file.open("w") as out:
                for length in np.clip(lengths, 8, max_length - 2).astype(int):
                    text = "".join(rng.choice(letters, length))
                    row = {"prompt": text[: length // 4], "completion": text[length // 4 :]}
                    out.write(json.dumps(row) + "\n")
        return file

    def fit(self, value: int, toy_value: int) -> int:
        return toy_value if self.toy else value

    def train(
        self,
        shape: str = "0.5b",
        length: int = 4096,
        steps: int = 6,
        stage: int | str = 1,
        **flags: object,
    ) -> Run:
        """Some steps of train.py, which is then killed: it would save at its end.

        Args:
            length: tokens of the longest row, of a micro-batch, and a quarter of a step's.
            stage: which of ds_configs/zeroSTAGE.json.
            flags: keys of the run config that differ, `section__key`; None leaves one out.
        """
        self.runs += 1
        length = self.fit(length, 256)
        run = Path(str(flags.get("output_dir", self.folder / f"run_{self.runs}")))
        config = self.folder / f"run_{self.runs}.yaml"
        config.write_text(f"output_dir: {run}\n")
        given = {
            "ds_config": f"ds_configs/zero{stage}.json",
            "model__name_or_path": self.model(shape, length),
            "model__from_config": shape != WITH_WEIGHTS,
            "model__tokenizer": TOKENIZER,
            "data__train_sources": f"[{self.rows(length)}]",
            "data__cache_dir": self.folder / "cache",
            "data__max_length": length,
            "data__micro_batch_tokens": length,
            "train__global_batch_tokens": 4 * length,
            "train__steps": 10_000,
            "train__learning_rate": 1e-4,
            "train__precision": "fp32" if self.toy else "bf16",
            "tracking__wandb": "disabled",
            **flags,
        }
        words = [
            f"--{key.replace('__', '.')}={json.dumps(value) if isinstance(value, bool) else value}"
            for key, value in given.items()
            if value is not None
        ]
        output = self.command(
            "train.py", "--config", config, *words, until=lambda: len(read_steps(run)) >= steps
        )
        states_gib = float(re.search(r"model\s+states\s+(\S+)\s+GiB", output)[1])
        return Run(run, read_steps(run)[:steps], states_gib)

    def figures_of(self, steps: list[dict[str, Any]]) -> Figures:
        """Rates from the end of the warm-up on, whatever happens between steps included."""
        timed = steps[WARM_UP_STEPS:]
        seconds = steps[-1]["time"] - steps[WARM_UP_STEPS - 1]["time"]
        figures = {"tokens_per_s": sum(step["tokens"] for step in timed) / seconds}
        if "model_flops_per_s" in steps[0]:
            flops = sum(step["model_flops_per_s"] * step["step_seconds"] for step in timed)
            rate = flops / seconds / 1e12
            figures |= {"model_tflops_per_s": rate, "loss": steps[-1]["loss"]}
            figures["share_of_matmul"] = rate / self.matmul_tflops_per_s
        if "memory_peak_gib" in steps[-1]:
            figures["peak_memory_gib"] = steps[-1]["memory_peak_gib"]
        return figures


def read_steps(run: Path) -> list[dict[str, Any]]:
    """The step records that a run has written so far."""
    file = run / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.is_file() else []
    records = [json.loads(line) for line in lines if line.endswith("\n")]
    return [record for record in records if record["kind"] == "train"]
