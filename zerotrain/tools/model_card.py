"""The model card of an export: README.md with the front matter that the hub reads."""

from itertools import chain
from pathlib import Path

import transformers
import yaml

from zerotrain.checkpoint.state import TrainerState
from zerotrain.config.schema import Config
from zerotrain.model.hub import split_revision


def model_card(config: Config, state: TrainerState, is_adapter: bool) -> str:
    """Return README.md of an exported checkpoint. It has only the last part of local paths, because
    it is published, and paths name people and machines.
    """
    model = config.model
    train = config.train
    run = state.run
    progress = state.progress
    name, _ = split_revision(model.name_or_path)
    base = Path(name).name
    library = "peft" if is_adapter else "transformers"
    front = {"library_name": library, "pipeline_tag": "text-generation"}
    if not (model.from_config or Path(name).exists()):
        front["base_model"] = base = name
    made = "LoRA adapters of" if is_adapter else "Fine-tuned from"
    if model.from_config:
        made = "Trained from random weights in the architecture of"
    loss = "not measured" if progress.eval_loss is None else f"{progress.eval_loss:.4f}"
    sources = [("training", source) for source in config.data.train_sources]
    held_out = chain(*config.data.eval_sources.values())
    sources += [("held out", source) for source in held_out]
    data = "\n".join(f"| {kind} | `{s.hub or Path(s.path).name}` |" for kind, s in sources)
    return f"""\
---
{yaml.safe_dump(front, sort_keys=False)}---

# {Path(config.output_dir).name}

{made} `{base}`: {progress.step:,} steps, {progress.examples:,} examples and
{progress.tokens:,} tokens.

| | |
| --- | --- |
| learning rate | {run.settings["train.learning_rate (scaled)"]:.4g}, {train.lr_schedule} |
| {train.global_batch_key} | {train.global_batch:,} |
| precision | {run.precision} |
| ranks | {run.world_size:,}, ZeRO stage {run.zero_stage} |
| evaluation loss | {loss} |
| written by | transformers {transformers.__version__}; 4.57 reads it, too |
{data}

Add `license:` to the front matter above. The licenses of the base model and of the data apply.
"""
