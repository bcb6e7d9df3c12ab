"""Check that a folder's weights fit the architecture, before any are loaded."""

import re
import traceback
from collections.abc import Iterable
from functools import partial

from transformers import AutoModelForCausalLM, PretrainedConfig

from config.schema import Config
from model.architecture import is_multimodal
from model.base import processor_files
from model.hub import from_hub
from model.stored import check_ties
from runtime.errors import UserError, some

# Masks and tables that older versions of transformers saved with the weights.
NO_WEIGHTS = re.compile(
    r"(^|\.)(inv_freq|position_ids|masked_bias|causal_mask|(attn|attention)\.bias)$"
)


def _fetch_processor(name: str, revision: str | None, **_: object) -> None:
    processor_files(name, revision, fetch=True)


def check_weights(config: Config, model_config: PretrainedConfig) -> str | None:
    """Compare names and shapes of the pretrained weights with those of the architecture.

    transformers initializes missing weights randomly, and under ZeRO-3 does not report other
    mismatches. Here it loads onto the meta device, which maps names as usual, but reads no values.

    Returns:
        A line about weights of other parts in the files (a vision tower, a value head), if any.

    Raises:
        UserError: weights are missing, have another shape or contradict a tie; the files have
            weights for layers of this architecture that neither the config nor model.ignore_weights
            accounts for; or there are adapters.
    """
    name = config.model.name_or_path
    load = partial(
        AutoModelForCausalLM.from_pretrained, device_map="meta", output_loading_info=True
    )
    try:
        model, found = from_hub(
            load,
            "model.name_or_path",
            name,
            config,
            config=model_config,
            ignore_mismatched_sizes=True,  # reported below
        )
    except UserError as error:
        if unmade := _unmade_tensors(error.__cause__):
            raise UserError(
                f"model.name_or_path: {name}: {len(unmade):,} tensors cannot be built from those "
                f"in its files, of which some are missing or have another shape: {some(unmade)}"
            ) from error
        raise
    if hasattr(model, "peft_config"):
        raise UserError(
            f"model.name_or_path: {name} has adapters next to its weights, which transformers "
            "loads too; merge them into the weights, or remove adapter_config.json"
        )
    if mismatched := sorted(found["mismatched_keys"]):
        key, stored, wanted = mismatched[0]
        more = f" (and {len(mismatched) - 1:,} more)" if mismatched[1:] else ""
        raise UserError(
            f"model.name_or_path: {name}: {key} has shape {list(stored)} in its files, but "
            f"{list(wanted)} in its config.json{more}; use the config.json that belongs to the "
            "weights"
        )
    _refuse_missing(name, found["missing_keys"])
    if is_multimodal(model_config):
        from_hub(_fetch_processor, "model.name_or_path", name, config)
    check_ties(name, config.model.revision, model)
    try:
        ignored = [NO_WEIGHTS, *map(re.compile, config.model.ignore_weights)]
    except re.error as error:
        raise UserError(
            f"model.ignore_weights: {error.pattern!r} is not a regular expression: {error.msg}"
        ) from error
    unused = sorted(
        key for key in found["unexpected_keys"] if not any(p.search(key) for p in ignored)
    )
    places = {place for key in model.state_dict() for place in _places(key)}
    if left_out := [key for key in unused if places.intersection(_places(key))]:
        raise UserError(
            f"model.name_or_path: {name} has {len(left_out):,} weights that its config.json has no "
            f"place for: {some(left_out)}; use the config.json that belongs to the weights, or "
            "ignore them with model.ignore_weights (regular expressions)"
        )
    if not unused:
        return None
    return f"{name}: {len(unused):,} weights of other parts are not used: {some(unused)}"


def _unmade_tensors(error: BaseException | None) -> list[str]:
    """Tensors that transformers could not build from those in the files, e.g. all experts of a
    layer from single ones. Its error only refers to its log.
    """
    for frame, _ in traceback.walk_tb(error and error.__traceback__):
        info = frame.f_locals.get("loading_info")
        if names := getattr(info, "conversion_errors", None):
            return sorted(names)
    return []


def _refuse_missing(name: str, missing: Iterable[str]) -> None:
    # The list has neither tied heads nor what the model's class declares as optional. It has
    # persistent buffers, which in transformers' models are trained or come with the weights.
    if missing := sorted(missing):
        raise UserError(
            f"model.name_or_path: {name} has no weights for {len(missing):,} of the model's "
            f"tensors: {some(missing)}; they would start from random values: complete the files, "
            "or set model.from_config to true to train from random weights"
        )


def _places(key: str) -> set[str]:
    """The module of a weight and, if it is in a stack of layers, the stack; `*` for indices."""
    parts = ["*" if part.isdigit() else part for part in key.split(".")]
    places = {".".join(parts[:-1])}
    if "*" in parts:
        places.add(".".join(parts[: parts.index("*") + 1]))
    return places
