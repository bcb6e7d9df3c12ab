"""The commands of a Markdown page."""

import re
import shlex

from harness.processes import run


def commands_in(page):
    """List the commands in the ```console and ```bash blocks of a page, in order.

    In a bash block, each line that begins with .venv/ is a command, and so is the text between two.
    """
    found = []
    for kind, block in re.findall(r"^```(bash|console)\n(.*?)^```", page, re.DOTALL | re.MULTILINE):
        begin = r"^(?=\.venv/)" if kind == "bash" else r"^\S*\$ "
        found += re.split(begin, block, flags=re.MULTILINE)[kind == "console" :]
    return [command.strip() for command in found]


def run_command(command, forks, *variables):
    """Run a command of a page in the repository of a fork server. Scripts and training on one rank
    are forked, because imports take most of their time.
    """
    words = shlex.split(command)
    if words[:2] == [".venv/bin/python", "-m"]:
        return forks.script(*words[2:])
    if words[0] == ".venv/bin/deepspeed":
        module = "train" if "train.py" in words else "scripts.rehearse"
        return forks.train(*words[words.index("--config") + 1 :], module=module)
    shell = ("env", *variables, "bash", "-euo", "pipefail", "-c", command)
    return run(shell, timeout=1200, cwd=forks.repo)
