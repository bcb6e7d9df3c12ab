"""Check that pretrained weights fit the architecture, before any are loaded."""

import re
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.modeling_utils import load_state_dict

from zerotrain.config.schema import Config
from zerotrain.model.architecture import is_multimodal
from zerotrain.model.base import processor_files, weight_files
from zerotrain.model.hub import load_pretrained
from zerotrain.runtime.errors import UserError, listed

# Masks and tables that older versions of transformers saved with the weights.
NO_WEIGHTS = re.compile(
    r"(^|\.)(inv_freq|position_ids|masked_bias|causal_mask|(attn|attention)\.bias)$"
)


def check_weights(config: Config, model_config: PretrainedConfig) -> str | None:
    """Compare names and shapes of the pretrained weights with those of the architecture, and fetch
    the files.

    transformers fills missing and mismatched weights with random values, and under ZeRO-3 reports
    only the missing ones. So it loads onto the meta device here, which maps names as usual, reads
    no values, and reports all three kinds.

    Returns:
        A line about weights in the files that the model does not use (a vision tower, a value
        head), if there are any.

    Raises:
        UserError: weights are missing, have another shape or contradict a tie; or there are
            adapters beside them.
    """
    name, revision = config.model.name_or_path, config.model.revision
    trust = config.model.trust_remote_code
    skeleton, unused = load_skeleton(name, revision, trust, model_config)
    if hasattr(skeleton, "peft_config"):
        raise UserError(
            f"model.name_or_path: {name} has adapters next to its weights, which transformers "
            "loads too; merge them into the weights, or remove adapter_config.json"
        )
    if is_multimodal(model_config):
        processor_files(name, revision, fetch=True)
    if not unused:
        return None
    return f"{name}: {len(unused):,} tensors in its files are not used: {listed(unused)}"


def load_skeleton(
    name: str,
    revision: str | None,
    trust_remote_code: bool = False,
    model_config: PretrainedConfig | None = None,
) -> tuple[PreTrainedModel, list[str]]:
    """A pretrained model on the meta device, and the tensors in its files that it does not use.

    Raises:
        UserError: as check_weights.
    """
    model, report = load_pretrained(
        partial(AutoModelForCausalLM.from_pretrained, device_map="meta", output_loading_info=True),
        name,
        "model.name_or_path",
        revision,
        trust_remote_code,
        config=model_config,
        ignore_mismatched_sizes=True,  # reported here
    )
    if mismatched := sorted(report["mismatched_keys"]):
        key, stored, wanted = mismatched[0]
        raise UserError(
            f"model.name_or_path: {name}: {key} has shape {list(stored)} in its files, but "
            f"{list(wanted)} in its config.json, and {len(mismatched) - 1:,} more differ; use the "
            "config.json that belongs to the weights"
        )
    refuse_missing(name, report["missing_keys"])
    _check_ties(name, weight_files(name, revision), model)
    return model, sorted(key for key in report["unexpected_keys"] if not NO_WEIGHTS.search(key))


def refuse_missing(name: str, missing: Iterable[str]) -> None:
    """Raise UserError if the report of a load has tensors without weights. It has neither tied
    heads nor what the model's class declares as optional.
    """
    if missing := sorted(missing):
        raise UserError(
            f"model.name_or_path: {name} has no weights for {len(missing):,} of the model's "
            f"tensors: {listed(missing)}; they would start from random values: complete the files, "
            "or set model.from_config to true to train from random weights"
        )


def _check_ties(name: str, files: list[Path], model: PreTrainedModel) -> None:
    """Refuse a config.json that ties an output head to the embeddings where the files have a head
    of its own. transformers then trains that head, but under ZeRO-3 the embeddings in its place,
    and servers do either.

    Args:
        model: on the meta device, where transformers leaves a pair untied if the files have both.
    """
    for head, embeddings in model.all_tied_weights_keys.items():
        if model.get_parameter(head) is model.get_parameter(embeddings):
            continue
        values = [_read_tensor(files, tensor).float() for tensor in (head, embeddings)]
        if not torch.equal(*values):
            raise UserError(
                f"model.name_or_path: {name}: its config.json ties {head} to {embeddings}, but "
                'they differ in its files; set "tie_word_embeddings": false there to keep both, or '
                f"remove {head} from the files"
            )


def _read_tensor(files: list[Path], name: str) -> torch.Tensor:
    """A tensor in a model's files, whose names there may begin in another way."""
    ending = ".".join(name.split(".")[-2:])
    found = {key: file for file in files for key in load_state_dict(file, "meta")}
    key = min((key for key in found if key.endswith(ending)), key=len)
    return load_state_dict(found[key])[key]  # memory-mapped
