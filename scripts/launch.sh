#!/usr/bin/env bash
# Runs a training job on the hosts of a hostfile, watches every host and returns its exit code:
#   scripts/launch.sh --hostfile hostfile [--include ...] [--max_restarts N] -- train.py --config ...
# Code and .venv must be at the same paths on every host. See docs/multi_node.md.
set -euo pipefail
cd "$(dirname "$0")/.."
if [ ! -x .venv/bin/python ]; then
  echo "error: $PWD/.venv/bin/python does not exist; run scripts/setup.sh, or link .venv to an environment that has the packages" >&2
  exit 2
fi
exec "$PWD/.venv/bin/python" -m zerotrain.launch.launch "$@"
