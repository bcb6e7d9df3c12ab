#!/usr/bin/env bash
# Draws the pictures of the pages into docs/pictures, from what runs have left in docs/pictures/data:
#   ./benchmarks/pictures.sh                as it is
#   ./benchmarks/pictures.sh --run          anew; or what is named: losses (on CPUs), first_run, simulation, demo
# SMOLLM2="MODEL_FOLDER ROWS.jsonl" are the arguments of first_run.sh where no hub can be reached.
# bf16, for docs/bf16.md, is made only if it is named. It trains STEPS (60) steps at RATE (1e-5): SMOLLM2's
# model on its rows, or without SMOLLM2 the demo's model, after 120 steps of the demo, on the demo's rows.
# The picture of the report is drawn by chromium or Google Chrome; without them it stays as it is.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup.sh
data=docs/pictures/data work=runs/pictures recipe=demo
mkdir -p $data/demo $work

# RANKS STAGE [FLAG ...]: the recipe for 30 steps
train() {
  torchrun --standalone --nproc_per_node "$1" train.py --config "recipes/$recipe.yaml" --output_dir $work/run \
    --ds_config "ds_configs/zero$2.json" --train.steps 30 --data.eval_sources '[]' --eval.every_steps 0 \
    --checkpoint.every_steps 10 --tracking.wandb disabled "${@:3}" >> $work/log 2>&1
}

# NAME: adds the losses of the last run to the table
record() {
  sed -nE 's/.*"kind": "train".*"step": ([0-9]+),.*"loss": ([^,]+),.*/\1,"'"$1"'",\2/p' $work/run/metrics.jsonl \
    >> $work/losses.csv
  rm -r $work/run
}

run_losses() {
  export DS_ACCELERATOR=cpu CUDA_VISIBLE_DEVICES=
  rm -rf $work/run $work/model
  # all begin with the weights of a first step: random ones are others under ZeRO 3
  train 1 0 --train.steps 1
  python -m scripts.export $work/run $work/model
  rm -r $work/run
  echo step,run,loss > $work/losses.csv
  local weights=(--model.name_or_path $work/model --model.from_config false)
  train 1 0 "${weights[@]}"
  record "1 rank, ZeRO 0"
  for stage in 0 1 2 3; do
    train 2 $stage "${weights[@]}"
    record "2 ranks, ZeRO $stage"
  done
  train 4 2 "${weights[@]}"
  record "4 ranks, ZeRO 2"
  train 4 3 "${weights[@]}" &
  until grep -qs '"kind": "train".*"step": 15,' $work/run/metrics.jsonl; do kill -0 $! && sleep .1; done
  pkill -KILL -P "$(pgrep -P $!)" # the ranks
  wait $! || true
  train 2 1 "${weights[@]}"
  record "4 ranks, killed; then 2"
  mv $work/losses.csv $data
}

run_first_run() {
  local run
  ./scripts/first_run.sh ${SMOLLM2:-} > $work/first_run.txt
  run=$(grep -o 'runs/first_run_[0-9_]*' $work/first_run.txt | tail -1)
  { echo step,of,loss
    sed -nE -e 's/.*"kind": "train".*"step": ([0-9]+),.*"loss": ([^,]+),.*/\1,training,\2/p' \
      -e 's/.*"kind": "eval".*"step": ([0-9]+), "eval_loss": ([^,]+),.*/\1,held out,\2/p' "$run/metrics.jsonl"
  } > $data/first_run.csv
}

# Three runs with the same rows, from the same bf16 weights
run_bf16() {
  local steps=${STEPS:-60} recipe=demo model rows keys flags run precision masters
  rm -rf $work/run $work/model
  if [ -n "${SMOLLM2:-}" ]; then
    read -r model rows <<< "$SMOLLM2"
    python - "$model" $work/model <<'EOF'
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer
AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="bfloat16").save_pretrained(sys.argv[2])
AutoTokenizer.from_pretrained(sys.argv[1]).save_pretrained(sys.argv[2])
EOF
    head -n -40 "$rows" > $work/train.jsonl
    tail -n 40 "$rows" > $work/held_out.jsonl
    keys="columns: {prompt: question, completion: answer}"
    recipe=smollm2-135m
    flags=(--data.train_sources "[{path: $work/train.jsonl, $keys}]"
      --data.eval_sources "[{path: $work/held_out.jsonl, $keys}]" --data.max_length 256 --data.on_too_long drop
      --data.micro_batch_tokens 1024 --eval.generate 0)
  else
    train 1 2 --train.steps 120
    python -m scripts.export $work/run $work/model --dtype bfloat16
    rm -r $work/run
    flags=(--model.from_config false --data.eval_sources '[data/sample/eval.jsonl]')
  fi
  flags+=(--model.name_or_path $work/model --train.steps "$steps" --train.learning_rate "${RATE:-1e-5}"
    --train.warmup_examples 16 --eval.every_steps $(((steps + 4) / 5)) --checkpoint.every_steps 0)
  echo step,run,loss > $work/bf16.csv
  for run in fp32 "bf16 spread" "bf16 loaded"; do
    read -r precision masters <<< "$run"
    train 1 2 "${flags[@]}" --train.precision "$precision" --train.masters "${masters:-loaded}"
    sed -nE 's/.*"kind": "eval".*"step": ([0-9]+), "eval_loss": ([^,]+),.*/\1,'"$run"',\2/p' \
      $work/run/metrics.jsonl >> $work/bf16.csv
    rm -r $work/run
  done
  mv $work/bf16.csv $data
}

run_simulation() {
  python -m benchmarks.simulate | sed 's/,//g; s/^ *//; s/  */,/g' > $work/efficiency.csv
  mv $work/efficiency.csv $data
}

# What is left on the terminal at the end: a progress bar is two lines, which are erased before it is drawn again
run_demo() {
  local run erased='[^\n]*\n[^\n]*\r\e\[2K\e\[1A\e\[2K'
  TERM=xterm-256color COLUMNS=104 script -qec ./scripts/demo.sh /dev/null < /dev/null |
    perl -0pe "s/$erased//g" > $work/terminal.txt
  run=$(grep -o '^runs/demo_[0-9_]*' $work/terminal.txt | tail -1)
  cp "$run"/resolved_* $data/demo
  sed -i "s#$PWD/##" $data/demo/resolved_config.yaml
  # what the first screen of the report shows
  sed -E -e '/"kind": "(start|train|eval|event)"/!d' -e "s/\"$(hostname): /\"node-1: /" \
    -e 's/, "(epoch|examples|[a-z]*_?tokens|micro_steps|[a-z_]+_(efficiency|flops_per_s|skipped|seconds))": [^,}]+//g' \
    "$run/metrics.jsonl" > $data/demo/metrics.jsonl
  mv $work/terminal.txt $data
}

if [ "${1:-}" = --run ]; then
  shift
  [ $# -gt 0 ] || set -- losses first_run simulation demo
  for what; do "run_$what"; done
fi

python -m benchmarks.pictures
browser=$(command -v chromium || command -v google-chrome) || exit 0
(cd $data && PYTHONPATH=$OLDPWD python -m scripts.report demo --output "$OLDPWD/$work/report.html")
cat >> $work/report.html << 'EOF'
<script>
  // in place of the page, as a comment: an SVG of all that is above its first folded section
  onload = () => setTimeout(() => {
    const css = document.querySelector("style").textContent
    const height = document.querySelector("details").offsetTop
    const size = `width="1000" height="${height}"`
    document.querySelectorAll("script, details").forEach(element => element.remove())
    const body = new XMLSerializer().serializeToString(document.body)
    document.documentElement.replaceChildren(new Comment(`<svg xmlns="http://www.w3.org/2000/svg" ${size} viewBox="0 0 1000 ${height}">
      <style>${css}
        body { height: 100%; box-sizing: border-box; border: 1px solid var(--line) }
        .first { grid-template-columns: 2fr 1fr !important }
        .svg-container { position: relative } .main-svg { position: absolute; top: 0; left: 0 }
      </style>
      <foreignObject ${size}>${body}</foreignObject></svg>`))
  }, 5000)
</script>
EOF
"$browser" --headless --no-sandbox --disable-gpu --window-size=1000,800 --user-data-dir=$work/browser \
  --virtual-time-budget=20000 --dump-dom "file://$PWD/$work/report.html" 2>> $work/log |
  sed -nE '/<!--<svg/,/-->/{s/.*<!--(<svg)/\1/; s/-->.*//; p}' > $work/report.svg
mv $work/report.svg docs/pictures
