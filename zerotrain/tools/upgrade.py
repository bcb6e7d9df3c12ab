"""Runs the first steps of a config with other versions of its packages, in an environment of their
own, and puts both runs side by side, for `prove.py upgrade`.
"""

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement

from zerotrain.config.parse import dump_config
from zerotrain.config.schema import CheckpointConfig, Config, EvalConfig, TrackingConfig
from zerotrain.runtime.errors import RunFailed, UserError
from zerotrain.tools.compare import compare_curves
from zerotrain.tools.equivalence import CURVES, start_training
from zerotrain.tools.report import read_run

WARM_UP_STEPS = 5  # not measured: kernels are loaded, memory is allocated, connections are made


def prove_upgrade(config: Config, wanted: str, ranks: int, steps: int, work: Path) -> bool:
    """Train `steps` steps with the installed packages, and with `wanted` in place of what
    requirements.txt pins; print speed, memory and the curves' differences.

    Args:
        wanted: such as deepspeed==0.19.9,torch==2.13.1.
        work: folder for the runs and the second environment, which is kept.

    Returns:
        Whether losses and gradient norms are the same, within the tolerance of the precision.

    Raises:
        UserError: the packages cannot be installed.
        RunFailed: a run fails.
    """
    text = changed_requirements(Path("requirements.txt").read_text(encoding="utf-8"), wanted)
    work.mkdir(parents=True, exist_ok=True)
    python = make_environment(work / "environment", text)
    file = work / "config.yaml"
    file.write_text(dump_config(short_run(config, steps)), encoding="utf-8")
    before, after = work / "before", work / "after"
    in_16_bits = config.train.precision in ("bf16", "fp16")
    for name, interpreter, folder in (
        ("installed", sys.executable, before),
        (wanted, str(python), after),
    ):
        shutil.rmtree(folder, ignore_errors=True)
        trust = f"--model.trust_remote_code={config.model.trust_remote_code}"
        flags = [f"--output_dir={folder}", trust]
        code, output, cpu_gib = start_training(file, flags, ranks, interpreter)
        log = folder.with_suffix(".log")
        log.write_text(output, encoding="utf-8")
        if code:
            raise RunFailed(f"the run with {name} ended with exit code {code}: see {log}")
        run = read_run(folder).series
        speed = run["tokens_per_s"].iloc[WARM_UP_STEPS:].median()
        gpu = ""
        if "memory_peak_gib" in run:
            gpu = f", {run['memory_peak_gib'].max():.2f} GiB of rank 0's GPU"
            in_16_bits = config.train.precision != "fp32"  # auto
        print(
            f"{name:<32} last loss {run['loss'].iloc[-1]:.6f}, {speed:,.0f} tokens/s, "
            f"{cpu_gib:.2f} GiB of the largest process{gpu}",
            flush=True,
        )
    return compare_curves(before, after, CURVES["bf16" if in_16_bits else "fp32"])


def changed_requirements(text: str, wanted: str) -> str:
    """The lines of requirements.txt with the versions that are wanted.

    Raises:
        UserError: not NAME==VERSION,..., or a package that is not in requirements.txt.
    """
    lines = {}
    for line in text.splitlines():
        if pin := line.partition("#")[0].strip():
            lines[Requirement(pin).name.lower()] = pin
    for word in wanted.split(","):
        try:
            name = Requirement(word).name.lower()
        except InvalidRequirement as error:
            raise UserError(f"--with {word}: give NAME==VERSION,...: {error}") from error
        if name not in lines:
            raise UserError(f"--with {word}: {name} is not in requirements.txt")
        lines[name] = word.strip()
    return "\n".join(lines.values()) + "\n"


def make_environment(folder: Path, requirements: str) -> Path:
    """The Python of a virtual environment with these requirements, which is made unless `folder`
    has it already.

    Raises:
        UserError: pip cannot install them.
    """
    python = folder / "bin" / "python"
    done = folder / "requirements.txt"
    if done.exists() and done.read_text() == requirements:
        return python
    print(f"installing into {folder} (minutes) ...", flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
    listed = folder / "wanted.txt"
    listed.write_text(requirements)
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    if subprocess.run([*pip, "-r", str(listed)]).returncode:
        raise UserError(f"pip cannot install {listed}: see above")
    listed.rename(done)
    return python


def short_run(config: Config, steps: int) -> Config:
    """The config's first steps, without evaluation, W&B and checkpoints before the last one."""
    return replace(
        config,
        train=replace(config.train, steps=steps, epochs=None),
        data=replace(config.data, eval_sources=[], eval_fraction=0.0),
        eval=EvalConfig(),
        checkpoint=CheckpointConfig(),
        tracking=TrackingConfig(wandb="disabled"),
        distributed=replace(config.distributed, world_size=None),
    )
