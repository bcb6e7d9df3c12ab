#!/usr/bin/env bash
# Creates .venv if it is missing, and runs the tests in it. Arguments go to pytest:
#   ./scripts/test.sh -m "not launch"     only the fast tests
#   ./scripts/test.sh -n 0                in one process, for a debugger
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup.sh
export WANDB_MODE=offline
unset PYTHONDONTWRITEBYTECODE # otherwise each of a hundred processes compiles the repository
ruff check .
ruff format --check .
# Three test processes use two cores well: launchers and hosts often wait. A fourth slows them down.
python -m pytest -n 3 --dist loadfile --no-loadscope-reorder "$@"
