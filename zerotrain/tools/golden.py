"""Losses that small copies of three recipes had once, for `prove.py golden`.

`prove.py equivalence` compares the trainer with a plain loop that runs on the same packages. If an
upgrade moves both, only these losses show it. golden.json has them, and the versions of the
packages that computed them. Each copy takes STEPS steps of train.py on one CPU rank, from random
weights, on rows of data/sample.

CPUs with other instructions, and more threads, sum in another order. With ATEN_CPU_CAPABILITY=avx2
or default instead of AVX-512, or two threads, the losses moved by up to 1.9e-7 in fp32 and 1.8e-4
in bf16. With experts it was up to 1.2e-3 in bf16, because a router that rounds differently picks
other ones. TOLERANCES are five times as large, and for experts 2.5 times.
"""

import json
import os
import re
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoConfig

from zerotrain.config.parse import parse_command_line
from zerotrain.runtime.errors import RunFailed
from zerotrain.tools.equivalence import cut_down, start_training
from zerotrain.tools.local_ranks import short_run
from zerotrain.tools.records import read_metrics

GOLDEN = Path(__file__).with_name("golden.json")
DENSE = {"fp32": 1e-6, "bf16": 1e-3}
TOLERANCES = {
    "llama-3.1-8b-lora": DENSE,  # adapters
    "olmo-3-7b": DENSE,  # windows
    "gpt-oss-20b": DENSE | {"bf16": 3e-3},  # experts
}
"""Relative, for each step, by recipe and precision."""
STEPS = 20
SAMPLE = Path("data/sample")


def train_copies(work: Path) -> dict[str, dict[str, list[float]]]:
    """Train all copies in the folder `work`, and return their losses by recipe and precision.

    Raises:
        RunFailed: a copy cannot be trained.
    """
    # The stored losses are a CPU's. Threads would change their last digits.
    os.environ |= {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return {
        recipe: {precision: train_copy(recipe, precision, work / recipe) for precision in limits}
        for recipe, limits in TOLERANCES.items()
    }


def store(losses: Mapping[str, Any]) -> None:
    """Write golden.json."""
    content = {"versions": installed_versions(), "losses": losses}
    GOLDEN.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def compare(losses: Mapping[str, Mapping[str, Sequence[float]]]) -> bool:
    """Compare losses with golden.json. Print a line for each run, and the packages whose versions
    differ.

    Returns:
        Whether all losses are as stored.
    """
    stored = json.loads(GOLDEN.read_text(encoding="utf-8"))
    verdicts = []
    for recipe, by_precision in losses.items():
        for precision, found in by_precision.items():
            moved = np.abs(np.divide(found, stored["losses"][recipe][precision]) - 1)
            limit = TOLERANCES[recipe][precision]
            verdicts.append(bool(np.all(moved <= limit)))  # NaN fails too
            print(
                f"{recipe:<18} {precision}  largest difference {np.max(moved):.1e}, at step "
                f"{np.argmax(moved) + 1}; limit {limit:.0e}: "
                f"{'as stored' if verdicts[-1] else 'MOVED'}"
            )
    before, now = stored["versions"], installed_versions()
    changed = [f"{n} {before.get(n)} -> {v}" for n, v in now.items() if v != before.get(n)]
    print(f"versions that differ from the stored ones: {', '.join(changed) or 'none'}")
    return all(verdicts)


def installed_versions() -> dict[str, str]:
    """Return the versions of what training needs, by name in requirements.txt."""
    training = Path("requirements.txt").read_text(encoding="utf-8").partition("# [tracking]")[0]
    found = {d.name.lower(): d.version.partition("+")[0] for d in metadata.distributions()}
    names = re.findall(r"^([\w.-]+)==", training, re.MULTILINE)
    return {name: found.get(name.lower(), "missing") for name in names}


def train_copy(recipe: str, precision: str, work: Path) -> list[float]:
    """Train the small copy of a recipe, and return the loss of each step.

    Raises:
        RunFailed: training ended with an error.
    """
    flags = ["--config", f"recipes/{recipe}.yaml", *short_run(STEPS)]
    name = parse_command_line(flags).config.model.name_or_path
    shapes = json.loads(Path("recipes/shapes.json").read_text(encoding="utf-8"))
    words = json.loads((SAMPLE / "model/config.json").read_text(encoding="utf-8"))["vocab_size"]
    whole = work / "whole"
    AutoConfig.for_model(**shapes[name] | {"vocab_size": words}).save_pretrained(whole)
    flags += [
        f"--model.name_or_path={whole}",
        f"--model.tokenizer={SAMPLE / 'model'}",
        f"--data.train_sources=[{SAMPLE / 'train.jsonl'}]",
        f"--output_dir={work / precision}",
    ]
    config = cut_down(parse_command_line(flags).config, work, 1, precision)
    ended = start_training(config, 1)
    if ended.code:
        log = f"{config.output_dir}.log"
        raise RunFailed(f"{recipe}, {precision}: exit code {ended.code}: see {log}")
    return [step["loss"] for step in read_metrics(config.output_dir)]
