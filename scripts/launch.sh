#!/usr/bin/env bash
# Runs a training job on the hosts of a hostfile, watches every host, returns the job's exit code:
#   scripts/launch.sh --hostfile hostfile [--include ...] [--max_restarts N] -- train.py --config ...
# Code and Python are at the same paths on every host. docs/multi_node.md says the rest.
set -euo pipefail
cd "$(dirname "$0")/.."
python=.venv/bin/python
[ -x "$python" ] || python=$(command -v python3)
exec "$python" -m cluster.launch "$@"
