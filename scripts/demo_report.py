"""The last output of the demo: the model before and after training, and where the files are.

python scripts/demo_report.py RUN_FOLDER MODEL_FOLDER
"""

import json
import statistics
import sys
from pathlib import Path

import yaml
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from zerotrain.checkpoint.run_folder import list_complete
from zerotrain.model.hub import load_pretrained
from zerotrain.runtime.errors import UserError, exit_on_error
from zerotrain.runtime.seeding import seed_everything
from zerotrain.tools.exact_match import ask, read_conversations
from zerotrain.tracking.console import quieten_libraries


def main() -> None:
    quieten_libraries(is_first=True)
    if len(sys.argv) != 3:
        raise UserError("give a run folder and a model folder: demo_report.py RUN MODEL")
    run, model_folder = Path(sys.argv[1]), Path(sys.argv[2])
    config = yaml.safe_load((run / "resolved_config.yaml").read_text())
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [line["eval_loss"] for line in lines if line["kind"] == "eval"]
    steps = [line for line in lines if line["kind"] == "train"]

    tokenizer = load_pretrained(AutoTokenizer.from_pretrained, model_folder)
    conversations = read_conversations(config["data"]["eval_sources"][0])
    seed_everything(config["train"]["seed"])  # for the random weights that the run started from
    architecture = load_pretrained(AutoConfig.from_pretrained, config["model"]["name_or_path"])
    untrained = AutoModelForCausalLM.from_config(architecture, trust_remote_code=False)
    trained = load_pretrained(AutoModelForCausalLM.from_pretrained, model_folder)
    answers = []
    for which, model in (("untrained", untrained), ("trained", trained)):
        print(f"asking the {which} model {len(conversations)} held-out questions ...", flush=True)
        answers.append(ask(model, tokenizer, conversations))
    right = [sum(answer.is_right for answer in of_model) for of_model in answers]

    tokens_per_s = statistics.median(line["tokens_per_s"] for line in steps)
    shown = len(conversations) // 2
    question, answer = conversations[shown][-2]["content"], answers[1][shown]
    rows = [
        ("", "before", "after"),
        ("held-out loss, nats per token", f"{losses[0]:.3f}", f"{losses[-1]:.3f}"),
        ("held-out answers right", *(f"{n} of {len(conversations)}" for n in right)),
    ]
    print()
    for name, before, after in rows:
        print(f"  {name:<30}{before:>12}{after:>12}")
    print(f"\n  asked       {question}\n  expected    {answer.expected}")
    print(f"  answered    {answer.said}\n")
    print(f"  speed       {tokens_per_s:,.0f} tokens/s over all ranks (median step)")
    print(f"  checkpoint  {list_complete(run / 'checkpoints')[-1]}")
    print(f"  model       {model_folder}  (a Hugging Face folder)")
    print(f"  metrics     {run / 'metrics.jsonl'}")
    print(f"  report      {run / 'report.html'}  (charts of the run, for a browser)")
    print(f"  W&B         {run / 'wandb'}  (offline; `wandb sync` uploads it)")
    print(f"\n  next: .venv/bin/python scripts/exact_match.py {model_folder} "
          f"{config['data']['eval_sources'][0]} --show 3\n")  # fmt: skip


if __name__ == "__main__":
    exit_on_error(main)
