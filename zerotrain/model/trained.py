"""The choice of trained parameters: all of them, the names in model.trainable, or the adapters of
model.lora.
"""

import re
import warnings
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from zerotrain.config.schema import LoraConfig, ModelConfig
from zerotrain.model.architecture import meta_model, text_modules
from zerotrain.model.hub import split_revision, summarize
from zerotrain.runtime.errors import UserError, first_of, similar

ADAPTER = "default"  # peft's name of the adapters

if TYPE_CHECKING:
    from peft import LoraModel


def skeleton_to_train(model_config: PretrainedConfig, config: ModelConfig) -> PreTrainedModel:
    """Return the model of a run on the meta device, with its adapters and frozen parts.

    Raises:
        UserError: as meta_model and freeze_and_adapt.
    """
    model = meta_model(model_config, config.trust_remote_code, config.attn_implementation)
    with torch.device("meta"):  # where the adapters, too, take no memory
        freeze_and_adapt(model, config)
    return model


def freeze_and_adapt(model: nn.Module, config: ModelConfig) -> None:
    """Insert the adapters of model.lora into the model, and freeze the parameters that are not
    trained. The adapters' A is drawn from the global RNG, their B is 0.

    Raises:
        UserError: model.trainable or model.lora names a part that the model does not have, or that
            cannot have an adapter.
    """
    if config.lora is not None:
        insert_adapters(model, config, config.lora)
    elif config.trainable:
        # tied weights have several names
        named = dict(model.named_parameters(remove_duplicate=False))
        model.requires_grad_(False)
        for name in _matching("trainable", config.trainable, named, re.search):
            named[name].requires_grad_(True)
    # Parameters that text does not use get no gradient: weight decay alone would change them.
    used = {p for module in text_modules(model) for p in module.parameters(recurse=False)}
    for parameter in set(model.parameters()) - used:
        parameter.requires_grad_(False)
    if not any(p.requires_grad for p in model.parameters()):
        raise UserError(
            "model.trainable: matches nothing that text uses; name modules of the language model"
        )


def insert_adapters(model: nn.Module, config: ModelConfig, lora: LoraConfig) -> "LoraModel":
    """Insert the adapters of model.lora into a model; return peft's handle, which can merge them.
    Options such as init_lora_weights: pissa also change the weights of the model.

    Raises:
        UserError: as freeze_and_adapt.
    """
    import peft  # takes a second
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    head = model.get_output_embeddings()
    used = set(text_modules(model))
    modules = {name: m for name, m in model.named_modules() if m in used}
    # A Mamba mixer's kernels get all other weights alone, without their adapters.
    mixers = [m for m in used if hasattr(m, "ssm_state_size")]
    bypassed = {part for m in mixers for part in m.children() if part is not m.in_proj}
    if lora.changes_base or lora.options.get("use_dora"):
        # DoRA would read the head while ZeRO 3 has it partitioned. PiSSA and OLoRA would change
        # tied embeddings, too.
        bypassed.add(head)
    if lora.changes_base:  # peft would lower r
        bypassed |= {m for m in used if getattr(m, "out_features", lora.r) < lora.r}
    # peft's own all-linear includes routers and experts of some models.
    all_linear = lora.target_modules == "all-linear"
    if all_linear:
        targets = [
            name
            for name, module in modules.items()
            if isinstance(module, (nn.Linear, Conv1D))
            and module not in {head, *bypassed}
            and {"router", "gate", "indexer"}.isdisjoint(name.split("."))
        ]
    else:
        targets = _matching("lora.target_modules", lora.target_modules, modules, _is_end)
        if wrong := [name for name in targets if modules[name] in bypassed]:
            raise UserError(
                f"model.lora.target_modules: {wrong[0]} cannot have an adapter: Mamba's kernels "
                "read its weight alone, DoRA, PiSSA and OLoRA do not work on an output head, nor "
                "the last two with fewer than r outputs; of a Mamba mixer, name only in_proj"
            )
    _matching("lora.modules_to_save", lora.modules_to_save, modules, _is_end)
    options = dict(lora.options)
    patterns = options.pop("target_parameters", [])
    weights = [name for name, _ in model.named_parameters() if ".experts." in name]
    experts = _matching("lora.options.target_parameters", patterns, weights, _is_end)
    name, revision = split_revision(config.name_or_path)
    settings = peft.LoraConfig(
        task_type="CAUSAL_LM",
        base_model_name_or_path=name,
        revision=revision,
        r=lora.r,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=targets,
        modules_to_save=lora.modules_to_save or None,
        **options,
    )
    try:
        # If a model's experts were modules before transformers 5, peft takes names such as gate and
        # up_proj for its experts and router, even if other layers have these names.
        convert_peft_config_for_transformers(settings, model, None)
        if settings.target_parameters and not all_linear:
            raise UserError(
                f"model.lora.target_modules: peft takes names of {type(model).__name__} for "
                f"{first_of(sorted(settings.target_parameters))}, which are experts or a router; "
                "name only layers such as [q_proj, k_proj, v_proj, o_proj], and experts in "
                "model.lora.options.target_parameters"
            )
        settings.target_parameters = experts
        settings.rank_pattern, settings.alpha_pattern = {}, {}
        with warnings.catch_warnings(action="ignore"):  # about tied weights: an export unties them
            return peft.LoraModel(model, settings, ADAPTER)
    # e.g. a 4-bit module in modules_to_save, dropout for experts, an odd r for orthogonal
    except (ValueError, RuntimeError) as error:
        raise UserError(f"model.lora: {summarize(error)}") from error


def _matching(
    key: str, patterns: list[str], names: Iterable[str], matches: Callable[[str, str], object]
) -> list[str]:
    """Return the names that match a pattern. Each pattern has to match at least one name."""
    found = []
    for pattern in patterns:
        matching = [name for name in names if matches(pattern, name)]
        if not matching:
            parts = sorted({p for name in names for p in name.split(".") if p.isidentifier()})
            raise UserError(
                f"model.{key}: the model has no {pattern}; use its names, which consist of "
                f"{', '.join(parts)}{similar(pattern, parts)}"
            )
        found += matching
    return found


def _is_end(ending: str, name: str) -> bool:
    return f".{name}".endswith(f".{ending}")
