#!/usr/bin/env bash
# Renews requirements.lock after a change of requirements.txt; needs uv. Arguments go to uv:
#   ./scripts/lock.sh                    keeps the locked versions of what requirements.txt does not pin
#   ./scripts/lock.sh --upgrade          takes the newest of them
#
# The lock is for every Python and platform at once. torch and what only torch needs are left out:
# which build is right depends on the machine.
set -euo pipefail
cd "$(dirname "$0")/.."
echo torch | uv pip compile requirements.txt --excludes /dev/stdin --universal --python-version 3.11 \
  --generate-hashes --no-annotate --custom-compile-command scripts/lock.sh \
  --quiet --output-file requirements.lock "$@"
