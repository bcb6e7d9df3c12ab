#!/usr/bin/env bash
# Renews requirements.lock after a change of requirements.txt; needs uv. Arguments go to uv:
#   ./scripts/lock.sh                    keeps the locked versions of what requirements.txt does not pin
#   ./scripts/lock.sh --upgrade          takes the newest of them
#
# The lock is for every Python and platform at once. torch and the CUDA packages of its build are left
# out, since which build is right depends on the machine; what every build needs is named here.
set -euo pipefail
cd "$(dirname "$0")/.."
printf '%s\n' networkx setuptools sympy | uv pip compile requirements.txt - --excludes <(echo torch) --universal --python-version 3.11 \
  --generate-hashes --no-annotate --custom-compile-command scripts/lock.sh \
  --quiet --output-file requirements.lock "$@"
