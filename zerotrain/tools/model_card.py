"""The model card of an export: README.md with the front matter that the hub reads."""

import json
from pathlib import Path

from zerotrain.checkpoint.state import TrainerState
from zerotrain.config.schema import Config

CARD = """\
---
{front}---

# {name}

{what} {base}: {step:,} steps, {examples:,} examples, {tokens:,} tokens.

## Data

{data}

## Recipe

| setting | value |
| --- | --- |
| learning rate | {rate:.4g}, {schedule} |
| global batch | {batch:,} {unit} |
| weight decay | {decay:g} |
| precision | {precision} |
| parallelism | ZeRO stage {stage} on {ranks:,} ranks |
| examples of at most | {longest:,} tokens |
| supervised | {supervised} |
| evaluation loss | {loss} |

## License

Add `license:` to the front matter above. The licenses of the base model and of the data apply.
"""


def model_card(config: Config, state: TrainerState, is_adapter: bool) -> str:
    """README.md of an exported checkpoint. Of local paths it has only the last part, because a card
    is published and paths name people and machines.
    """
    model = config.model
    train = config.train
    data = config.data
    progress = state.progress
    front = {"library_name": "transformers", "pipeline_tag": "text-generation"}
    if is_adapter:
        front["library_name"] = "peft"
    if not (model.from_config or Path(model.name_or_path).exists()):
        front["base_model"] = model.name_or_path
    sources = [("training", source) for source in data.sources("train_sources")]
    sources += [("held out", source) for source in data.sources("eval_sources")]
    made = "trained from random weights in the architecture of"
    if not model.from_config:
        made = "LoRA adapters of" if is_adapter else "fine-tuned from"
    return CARD.format(
        front="".join(f"{key}: {json.dumps(value)}\n" for key, value in front.items()),
        name=Path(config.output_dir).name,
        what=made[0].upper() + made[1:],
        base=f"`{front.get('base_model', Path(model.name_or_path).name)}`",
        step=progress.step,
        examples=progress.examples,
        tokens=progress.tokens,
        data="\n".join(f"- {kind}: `{s.hub or Path(s.path).name}`" for kind, s in sources),
        rate=state.run.settings["train.learning_rate (scaled)"],
        schedule=train.lr_schedule,
        batch=train.global_batch,
        unit="tokens" if train.global_batch_tokens else "examples",
        decay=train.weight_decay,
        precision=state.run.precision,
        stage=state.run.zero_stage,
        ranks=state.run.world_size,
        longest=data.max_length,
        supervised=data.supervise,
        loss="not measured" if progress.eval_loss is None else f"{progress.eval_loss:.4f}",
    )
