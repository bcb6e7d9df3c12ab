#!/usr/bin/env bash
# Creates .venv, trains on the sample data under `deepspeed` (on all GPUs, or two processes on CPU),
# exports the model and shows what it has learned. Arguments go to train.py:
#   ./scripts/demo.sh --train.steps 100
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup.sh

ranks=$(python -c 'import torch; print(torch.cuda.device_count())')
if [ "$ranks" = 0 ]; then
  ranks=2
  export DS_ACCELERATOR=cpu
fi
port=$(python -c 'from zerotrain.runtime.ports import free_port; print(free_port())')
run="runs/demo_$(date +%Y%m%d_%H%M%S)"

echo "training on $ranks ranks; the first run also tokenizes the sample data (10 s)"
deepspeed --num_gpus "$ranks" --master_port "$port" --log_level warning \
  train.py --config recipes/demo.yaml --output_dir "$run" "$@"
echo "exporting the model, drawing the report and answering the held-out questions"
python -m scripts.export "$run" "$run/model"
report=$(python -m scripts.report "$run")
python -m scripts.exact_match "$run/model" data/sample/eval.jsonl --show 1
if [ $# = 0 ]; then echo "expected:    at least 190 of 200"; fi
echo "open the report of the run in a browser: $report"
