#!/usr/bin/env bash
# Runs the test suite in .venv, which is created if it is missing. Arguments go to pytest:
#   ./scripts/test.sh -m "not launch"     only the fast tests
#   ./scripts/test.sh -n 0                in one process, for a debugger
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup.sh
export WANDB_MODE=offline
unset PYTHONDONTWRITEBYTECODE # or each of a hundred processes compiles the repository
ruff check .
ruff format --check .
# three on two cores: launchers and hosts wait much of the time; a fourth takes more than it gives
python -m pytest -n 3 --dist loadfile --no-loadscope-reorder "$@"
