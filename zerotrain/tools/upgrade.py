"""Runs the first steps of a config with other versions of its packages, in an environment of their
own, and puts both runs side by side, for `prove.py upgrade`.
"""

import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement

from zerotrain.config.schema import Config
from zerotrain.runtime.errors import RunFailed, UserError, listed
from zerotrain.tools.compare import compare_curves
from zerotrain.tools.equivalence import TOLERANCES, short_run, start_training
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
    before, after = work / "before", work / "after"
    in_16_bits = config.train.precision in ("bf16", "fp16")
    for name, interpreter, folder in (
        ("installed", sys.executable, before),
        (wanted, str(python), after),
    ):
        run_config = replace(short_run(config, steps), output_dir=str(folder))
        code, _, cpu_gib = start_training(run_config, ranks, interpreter)
        if code:
            raise RunFailed(f"the run with {name} ended with exit code {code}: see {folder}.log")
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
    return compare_curves(before, after, TOLERANCES["bf16" if in_16_bits else "fp32"])


def changed_requirements(text: str, wanted: str) -> str:
    """The lines of requirements.txt with the versions that are wanted.

    Raises:
        UserError: not NAME==VERSION,..., or a package that is not in requirements.txt.
    """
    pins = (line.partition("#")[0].strip() for line in text.splitlines())
    try:
        changed = _by_name(wanted.split(","))
    except InvalidRequirement as error:
        raise UserError(f"--with {wanted}: give NAME==VERSION,...: {error}") from error
    lines = _by_name(filter(None, pins))
    if unknown := changed.keys() - lines.keys():
        raise UserError(f"--with {wanted}: not in requirements.txt: {listed(sorted(unknown))}")
    return "\n".join((lines | changed).values()) + "\n"


def _by_name(requirements: Iterable[str]) -> dict[str, str]:
    return {Requirement(line).name.lower(): line.strip() for line in requirements}


def make_environment(folder: Path, requirements: str) -> Path:
    """The Python of a virtual environment with these requirements.

    Raises:
        UserError: pip cannot install them.
    """
    print(f"installing into {folder} (minutes at first) ...", flush=True)
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    file = folder / "requirements.txt"
    file.write_text(requirements)
    python = folder / "bin" / "python"
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    if subprocess.run([*pip, "-r", str(file)]).returncode:
        raise UserError(f"pip cannot install {file}: see above")
    return python
