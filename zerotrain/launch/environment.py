"""The environment variables that launch.sh sends to the hosts.

They travel through ssh's standard input, never on a command line: no shell expands them, and other
users of a machine cannot read them.
"""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from zerotrain.runtime.errors import UserError
from zerotrain.runtime.files import read_text

PREFIXES = (
    "NCCL_", "GLOO_", "UCX_", "FI_", "TORCH_", "PYTORCH_", "TRITON_", "CUDA_", "CUBLAS_", "OMP_",
    "HF_", "WANDB_", "DS_",
)  # fmt: skip
ENV_LINE = re.compile(
    r"(?:export\s+)?([A-Za-z_]\w*)\s*=\s*((?:[^\"'`$\\#%]|%(?![hnu%]))*)", re.ASCII
)
"""A line of `.deepspeed_env` that `deepspeed` takes literally. Its remote shell would expand or
remove the excluded characters, and pdsh replaces %h, %n, %u and %%.
"""


def environment_of_job(
    here: Mapping[str, str], names: Sequence[str], files: Sequence[Path] = ()
) -> dict[str, str]:
    """Return the variables for the ranks.

    These are the variables of `here` with a known prefix, the lines of `.deepspeed_env` files, and
    the variables that the user names. Later ones override earlier ones.

    Args:
        here: the environment of launch.sh.
        names: more variables of `here` to send.
        files: files of `NAME=VALUE` lines.

    Raises:
        UserError: a variable is not set, or a line is wrong.
    """
    job = {name: value for name, value in here.items() if name.startswith(PREFIXES)}
    for path in files:
        for number, line in enumerate(read_text(str(path)).splitlines(), start=1):
            text = line.strip()
            if not text or text.startswith("#"):
                continue
            match = ENV_LINE.fullmatch(text)
            if match is None:
                raise UserError(
                    f"{path}:{number}: not a line NAME=VALUE, or the value has a quote, $, `, \\, "
                    "# or %, which `deepspeed` does not take literally; write the value itself, or "
                    "remove the line, set NAME in the environment and give --env NAME"
                )
            job[match[1]] = match[2]
    for name in names:
        if name not in here:
            raise UserError(
                f"--env {name.partition('=')[0]}: not set here; give the name of a variable that "
                "is, as in `NAME=VALUE scripts/launch.sh --env NAME ...`"
            )
        job[name] = here[name]
    return job


def deepspeed_env_files() -> list[Path]:
    """Return the environment files that `deepspeed` itself would read, in its order."""
    name = os.environ.get("DS_ENV_FILE", ".deepspeed_env")
    return [path for path in dict.fromkeys((Path.home() / name, Path(name))) if path.exists()]
