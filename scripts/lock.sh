#!/usr/bin/env bash
# Renews requirements.lock after a change of requirements.txt. Needs uv, which gets the arguments:
#   ./scripts/lock.sh                    keeps the locked version of each package that is not pinned
#   ./scripts/lock.sh --upgrade          takes the newest version of these packages
#
# The lock is valid for every Python and platform. It leaves out torch and the CUDA packages of
# torch's build, because the machine decides which build is right. Each package is listed in the
# first section of requirements.txt that needs it.
set -euo pipefail
cd "$(dirname "$0")/.."

# Resolves the requirements of standard input, and those that every build of torch has.
resolve() {
  { cat; printf '%s\n' networkx setuptools sympy; } | uv pip compile - --excludes <(echo torch) \
    --universal --python-version 3.11 --no-annotate --no-header --quiet "$@"
}

# requirements.txt up to the end of a section.
up_to() {
  awk -v last="[$1]" '/^# \[/ && past { exit } $2 == last { past = 1 } 1' requirements.txt
}

resolve --generate-hashes --output-file requirements.lock "$@" < requirements.txt
for section in $(grep -o '^# \[.*\]' requirements.txt | tr -d '#[]'); do
  echo "# [$section]"
  up_to "$section" | resolve --constraints requirements.lock | sed 's/[=; ].*//'
done | python3 -c '
import re, sys
from pathlib import Path

lock = Path("requirements.lock")
wanted = sys.stdin.read().splitlines()
entries = re.findall(r"^([^#=; ]+)(.*(?:\n .*)*)", lock.read_text(), re.MULTILINE)
lines = ["# Written by scripts/lock.sh"]
for line in wanted:
    if line.startswith("#"):
        lines += ["", line]
    lines += [name + rest for name, rest in entries if name == line]
    entries = [entry for entry in entries if entry[0] != line]
lock.write_text("\n".join(lines) + "\n")
'
