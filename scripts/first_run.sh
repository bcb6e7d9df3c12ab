#!/usr/bin/env bash
# Creates .venv, fine-tunes SmolLM2-135M-Instruct on gsm8k (on all GPUs, or two processes on CPU), and
# shows two answers to held-out questions before and after. Model and rows come from the hub, or from
#   ./scripts/first_run.sh MODEL_FOLDER ROWS.jsonl [ARGUMENT_OF_TRAIN.PY ...]
# where the rows are {"question": ..., "answer": ...} and the last 40 are held out.
set -euo pipefail
flags=()
if [ $# -gt 0 ]; then
  if [ $# = 1 ] || [ ! -d "$1" ] || [ ! -f "$2" ]; then
    echo "error: give MODEL_FOLDER and ROWS.jsonl, or neither to take them from the hub" >&2
    exit 2
  fi
  model=$(realpath "$1") rows=$(realpath "$2")
  shift 2
fi
cd "$(dirname "$0")/.."
source scripts/setup.sh

ranks=$(python -c 'import torch; print(torch.cuda.device_count())')
if [ "$ranks" = 0 ]; then
  ranks=2
  export DS_ACCELERATOR=cpu
fi
port=$(python -c 'from zerotrain.runtime.ports import free_port; print(free_port())')
run="runs/first_run_$(date +%Y%m%d_%H%M%S)"
if [ -n "${model:-}" ]; then
  mkdir -p "$run"
  head -n -40 "$rows" > "$run/train.jsonl"
  tail -n 40 "$rows" > "$run/held_out.jsonl"
  keys="columns: {prompt: question, completion: answer}"
  flags=(--model.name_or_path "$model" --data.train_sources "[{path: $run/train.jsonl, $keys}]"
    --data.eval_sources "[{path: $run/held_out.jsonl, $keys}]")
fi

deepspeed --num_gpus "$ranks" --master_port "$port" --log_level warning \
  train.py --config recipes/smollm2-135m.yaml --output_dir "$run" "${flags[@]}" "$@"
python -m scripts.export "$run" "$run/model"
report=$(python -m scripts.report "$run")
python - "$run" << 'EOF'
import sys
from zerotrain.tools.records import read_metrics
first, *_, last = read_metrics(sys.argv[1], "generations")
for before, after in zip(first["rows"], last["rows"]):
    print(f"\n{before['prompt']}\n--- expected:\n{before['expected']}")
    print(f"--- before:\n{before['answer']}\n--- after:\n{after['answer']}")
losses = [record["eval_loss"] for record in read_metrics(sys.argv[1], "eval")]
print(f"\nheld-out loss before and after: {losses[0]:.4f}, {losses[-1]:.4f}")
EOF
echo "the model: $run/model; the report, for a browser: $report"
