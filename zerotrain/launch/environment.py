"""The environment variables that are sent to the hosts, through ssh's standard input: never on a
command line, so that no quoting is needed and secrets stay secret.
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
"""A line of `.deepspeed_env` whose value is text to `deepspeed` too. Its remote shell expands or
removes the other characters, and pdsh replaces %h, %n, %u and %%.
"""
# The node wrapper sets the devices of each host.
NEVER_SENT = {"CUDA_VISIBLE_DEVICES", "DS_ENV_FILE"}
SECRET_NAME = re.compile(
    r"(^|[_-])(PAT|SAS|PW)S?($|[_-])|(KEY|PASS|PWD|AUTH|COOKIE|JWT|WEBHOOK|DSN|CRED)S?($|[_-])"
    r"|APIKEY|TOKEN(?!I)|SECRET|PASSW(OR)?D|PASSPHRASE|CREDENTIAL|AUTHORIZATION|CONNECTION_?STRING",
    re.IGNORECASE,
)
SECRET_TEXT = re.compile(
    r"(?<=://)[^\s/]+(?=@)|(?<=[Bb]earer )\S+|(?<=[Bb]asic )[\w+/=]{8,}"
    r"|\b(?:hf_|npm_|gsk_|sk[-_]|gh[pousr]_|github_pat_|glpat-|xox[a-z]-|AKIA|ASIA|AIza"
    r"|nvapi-|ya29\.)[\w-]{8,}|\beyJ[\w-]{8,}\.[\w-]+\.[\w-]*"
    r"|(?i:key|token|secret|password|pwd|sig)=\S|-----BEGIN"
)
"""The known forms of a secret in a value: in a URI, a header or a file of keys, after a name, or by
how its issuer begins it.
"""


def environment_of_job(
    here: Mapping[str, str], added: Sequence[str], files: Sequence[Path] = ()
) -> dict[str, str]:
    """Variables for the ranks: those of `here` with a known prefix, those of `.deepspeed_env`
    files, and those that the user adds. Later ones override earlier ones.

    Args:
        here: the environment of launch.sh.
        added: `NAME`, whose value is taken from `here`, or `NAME=VALUE`.
        files: files of `NAME=VALUE` lines.

    Raises:
        UserError: a name or a line is wrong, or a secret is on the command line.
    """
    job = {n: v for n, v in here.items() if n.startswith(PREFIXES) and n not in NEVER_SENT}
    for path in files:
        for number, line in enumerate(read_text(str(path)).splitlines(), start=1):
            text = line.strip()
            if not text or text.startswith("#"):
                continue
            match = ENV_LINE.fullmatch(text)
            if match is None:
                raise UserError(
                    f"{path}:{number}: not a line NAME=VALUE, or the value has a quote, $, `, \\, "
                    "# or %, which are not plain text to `deepspeed`; write the value itself, or "
                    "remove the line, set NAME in the environment and give --env NAME"
                )
            job[match[1]] = match[2]
    for item in added:
        name, equals, value = item.partition("=")
        if not name.isidentifier() or name in NEVER_SENT:
            raise UserError(
                f"--env {name}: not the name of a variable that can be sent; devices are selected "
                "with --include node-1:0,2"
            )
        if equals and (SECRET_NAME.search(name) or SECRET_TEXT.search(value)):
            raise UserError(
                f"--env {name}=...: everyone on this machine can read command lines; set {name} in "
                f"the environment and give --env {name}"
            )
        if not equals and name not in here:
            raise UserError(f"--env {name}: not set here; set it, or give --env {name}=VALUE")
        job[name] = value if equals else here[name]
    return job


def deepspeed_env_files() -> list[Path]:
    """The environment files that `deepspeed` itself would read, in its order."""
    name = os.environ.get("DS_ENV_FILE", ".deepspeed_env")
    return [path for path in dict.fromkeys((Path.home() / name, Path(name))) if path.exists()]
