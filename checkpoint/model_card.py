"""The model card of an export: README.md with the front matter that the hub reads."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import ModelCardData

from checkpoint.manifest import Manifest
from checkpoint.run_folder import METRICS
from checkpoint.shards import ADAMS
from checkpoint.state import TrainerState
from config.schema import Config, DataConfig

SHOWN_EVALUATIONS = 12


@dataclass(frozen=True)
class About:
    """What a card says besides the run's config and state."""

    evaluations: list[tuple[int, float]]
    """(step, loss) up to the checkpoint."""
    optimizer: str
    """Class of the optimizer that made the checkpoint."""
    curve: str | None = None
    """File with the training loss, in the folder of the card."""
    license: str | None = None
    """The hub's id of a licence, which only the user can choose."""
    is_adapter: bool = False
    """The folder has adapters, not a whole model."""


def model_card(config: Config, state: TrainerState, manifest: Manifest, about: About) -> str:
    """README.md of an exported checkpoint. Of local paths it has only the last part, because a card
    is published and paths name people and machines.

    Args:
        config: of the run, as in its resolved_config.yaml.
    """
    model, name = config.model, Path(config.output_dir).absolute().name
    hub = _is_hub_id(model.name_or_path)
    is_tuned = not model.from_config
    front = ModelCardData(
        base_model=model.name_or_path if hub and is_tuned else None,
        datasets=_hub_data_sets(config.data) or None,
        license=about.license,
        library_name="peft" if about.is_adapter else "transformers",
        pipeline_tag="text-generation",
        model_name=name,
        tags=["deepspeed"],
    )
    base = _shown(model.name_or_path) + (f" at {model.revision}" if hub and model.revision else "")
    made = "fine-tuned from" if is_tuned else "trained from random weights in the architecture of"
    what = "LoRA adapters, trained on" if about.is_adapter else f"A causal language model {made}"
    progress = state.progress
    sections = [
        f"---\n{front.to_yaml()}\n---",
        f"# {name}",
        f"{what} {base}: {progress.step:,} steps, "
        f"{progress.examples:,} examples, {progress.tokens:,} tokens.",
        "## Data",
        "\n".join(_data_lines(config.data)),
        "## Recipe",
        _table(("setting", "value"), _recipe(config, state, about.optimizer)),
    ]
    if about.curve:
        sections += ["## Training", f"![Loss by step]({about.curve})"]
    if about.evaluations:
        rows = [(f"{step:,}", f"{loss:.4f}") for step, loss in _some(about.evaluations)]
        unit = "nats per supervised token"
        sections += ["## Evaluation", _table(("step", f"held-out loss, {unit}"), rows)]
    versions = manifest.made_by.get("versions")
    versions = versions.items() if isinstance(versions, dict) else ()
    unset = "Not set. Add `license:` to the front matter above; the"
    sections += [
        "## Versions",
        _table(("package", "version"), list(versions)),
        "## License",
        f"{f'`{about.license}`; the' if about.license else unset} licences of the base model and "
        "of the data apply.",
    ]
    return "\n\n".join(sections) + "\n"


def read_evaluations(run_folder: Path, step: int) -> list[tuple[int, float]]:
    """(step, loss) of a run's evaluations up to `step`, from its metrics.jsonl, if there is one."""
    found = {}
    try:
        lines = (run_folder / METRICS).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    for line in lines:
        try:
            values = json.loads(line)
            if values["kind"] == "eval" and values["step"] <= step:
                found[int(values["step"])] = float(values["eval_loss"])
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            pass  # an incomplete line of a run that was killed
    return sorted(found.items())


def _is_hub_id(name: str) -> bool:
    return not Path(name).exists() and name.count("/") <= 1 and name[:1] not in "./~"


def _shown(name: str) -> str:
    return f"`{name}`" if _is_hub_id(name) else f"`{Path(name).name}` (a local folder)"


def _hub_data_sets(data: DataConfig) -> list[str]:
    sources = data.sources("train_sources") + data.sources("eval_sources")
    return list(dict.fromkeys(source.hub for source in sources if source.hub))


def _data_lines(data: DataConfig) -> list[str]:
    lines = []
    for key, kind in (("train_sources", "training"), ("eval_sources", "held out")):
        for source in data.sources(key):
            if source.hub:
                name = ", ".join(filter(None, [source.hub, source.subset, source.split]))
                name = f"`{name}`" + (f" at {source.revision}" if source.revision else "")
            else:
                name = f"`{Path(source.path).name}`"
            weight = "" if source.weight is None else f", weight {source.weight:g}"
            lines.append(f"- {kind}: {name}{weight}")
    if data.eval_fraction:
        lines.append(f"- held out: {data.eval_fraction:.1%} of the training rows")
    return lines


def _recipe(config: Config, state: TrainerState, optimizer: str) -> list[tuple[str, str]]:
    train, data, run = config.train, config.data, state.run
    rate = run.optimization.get("train.learning_rate (scaled)")
    rate = rate if isinstance(rate, float) else train.learning_rate
    unit = train.global_batch_key.rpartition("_")[2].replace("size", "examples")
    supervised = {"answers": "answers", "last": "the last answer of a row", "all": "every token"}
    if optimizer in ADAMS:  # of which all are AdamW here
        betas = "betas {:g} and {:g}".format(*train.adam_betas)
        optimizer = f"AdamW, {betas}, epsilon {train.adam_epsilon:g}"
    rows = {
        "learning rate": f"{rate:.4g}, {train.lr_schedule}",
        "warm-up": f"{train.warmup:,} {train.warmup_key.removeprefix('warmup_')}",
        "global batch": f"{train.global_batch:,} {unit}",
        "optimizer": f"{optimizer}, weight decay {train.weight_decay:g}",
        "gradient clipping": f"{train.gradient_clipping:g}" if train.gradient_clipping else "off",
        "precision": run.precision,
        "parallelism": f"ZeRO stage {run.zero_stage} on {run.world_size:,} ranks",
        "longest example": f"{data.max_length:,} tokens",
        "batching": data.batching,
        "supervised": supervised[data.supervise],
        "seed": str(train.seed),
    }
    if lora := config.model.lora:
        rows["adapters"] = f"LoRA, rank {lora.r}, alpha {lora.alpha}, dropout {lora.dropout:g}"
    return list(rows.items())


def _table(head: tuple[str, str], rows: Sequence[tuple[str, str]]) -> str:
    lines = [head, ("---", "---"), *rows]
    return "\n".join(f"| {left} | {right} |" for left, right in lines)


def _some(evaluations: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """At most SHOWN_EVALUATIONS of them, evenly spaced, with the first and the last."""
    last, count = len(evaluations) - 1, min(len(evaluations), SHOWN_EVALUATIONS)
    return [evaluations[round(i * last / max(1, count - 1))] for i in range(count)]
