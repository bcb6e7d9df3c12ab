"""The commands of a Markdown page."""

import re


def commands_in(page):
    """The commands in the ```console and ```bash blocks of a page's text, in order; a bash block is
    one command.
    """
    found = []
    for kind, block in re.findall(r"^```(bash|console)\n(.*?)^```", page, re.DOTALL | re.MULTILINE):
        found += [block] if kind == "bash" else re.split(r"^\S*\$ ", block, flags=re.MULTILINE)[1:]
    return [command.strip() for command in found]
