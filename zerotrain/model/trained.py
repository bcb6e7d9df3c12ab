"""Which parameters are trained: all of them, those that model.trainable names, or the adapters of
model.lora.
"""

import difflib
import re
import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from zerotrain.config.schema import LoraConfig, ModelConfig
from zerotrain.model.architecture import freeze_other_parts, other_parts
from zerotrain.model.hub import first_line
from zerotrain.runtime.errors import UserError, listed

NAMES_SHOWN = 8
ADAPTER = "default"  # peft's name of the adapters

if TYPE_CHECKING:
    from peft import LoraModel


class Counts(NamedTuple):
    """Numbers of parameters, those of adapters included."""

    trained: int
    total: int
    quantized: int = 0
    """Of model.quantization: those of the linear layers but the output head."""


def count_trained(model: nn.Module, config: ModelConfig) -> Counts:
    """Apply choose_trained to a model on the meta device, and count its parameters.

    Raises:
        UserError: as choose_trained.
    """
    linear = _quantizable(model) if config.quantization else []
    quantized = sum(m.weight.numel() for m in linear)
    with torch.device("meta"):
        choose_trained(model, config)
    sizes = [(p.numel(), p.requires_grad) for p in model.parameters()]
    trained, total = sum(n for n, is_trained in sizes if is_trained), sum(n for n, _ in sizes)
    return Counts(trained, total, quantized)


def choose_trained(model: nn.Module, config: ModelConfig) -> None:
    """Freeze what is not trained, and insert the adapters of model.lora into the model; their A is
    drawn from the global RNG, their B is 0.

    Raises:
        UserError: model.trainable or model.lora names something that the model does not have, or
            that cannot have an adapter.
    """
    if config.lora is not None:
        insert_adapters(model, config, config.lora)
    elif config.trainable:
        _freeze_others(model, config.trainable)
    freeze_other_parts(model)
    if not any(p.requires_grad for p in model.parameters()):
        key = "lora" if config.lora else "trainable"
        raise UserError(
            f"model.{key}: names only parts of {type(model).__name__} that are not used for text, "
            "so nothing would be trained"
        )


def insert_adapters(model: nn.Module, config: ModelConfig, lora: LoraConfig) -> "LoraModel":
    """Insert the adapters of model.lora into a model; returns peft's handle, which can merge them.

    Raises:
        UserError: as choose_trained.
    """
    import peft  # takes a second

    _check_names(model, config, lora)
    # spelled out: peft includes routers and experts in its own all-linear, of some models
    all_linear = _linear(model)
    linear = [name for name, module in model.named_modules() if module in all_linear]
    others = "|".join(map(re.escape, other_parts(model)))
    settings = peft.LoraConfig(
        task_type="CAUSAL_LM",
        base_model_name_or_path=config.name_or_path,
        revision=config.revision,
        r=lora.r,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=linear if lora.target_modules == "all-linear" else lora.target_modules,
        exclude_modules=rf"({others})\..*" if others else None,
        modules_to_save=lora.modules_to_save or None,
    )
    try:
        with warnings.catch_warnings(action="ignore"):  # tied weights, which an export unties
            adapters = peft.LoraModel(model, settings, ADAPTER)
    except ValueError as error:
        raise UserError(f"model.lora.target_modules: {first_line(error)}") from error
    # In models whose experts were modules of their own before transformers 5, peft takes names such
    # as gate and up_proj for those of experts and router, also if other layers have them.
    if settings.target_parameters or settings.rank_pattern:
        raise UserError(
            f"model.lora.target_modules: peft takes names of {type(model).__name__} for "
            f"{listed(sorted(settings.target_parameters))}, which are experts or a router and "
            "cannot have adapters; name only layers such as [q_proj, k_proj, v_proj, o_proj]"
        )
    return adapters


def _check_names(model: nn.Module, config: ModelConfig, lora: LoraConfig) -> None:
    """That the model has what model.lora names."""
    modules = [name for name, _ in model.named_modules() if name]
    for key in ("target_modules", "modules_to_save"):
        wanted = getattr(lora, key)
        for end in [] if wanted == "all-linear" else wanted:
            found = [name for name in modules if f".{name}".endswith(f".{end}")]
            if not found:
                raise UserError(f"model.lora.{key}: the model has no {_unknown(end, modules)}")
            if config.quantization and key == "modules_to_save":
                whole = {m for name in found for m in model.get_submodule(name).modules()}
                if whole.intersection(_quantizable(model)):
                    raise UserError(
                        f"model.lora.{key}: {end} is frozen in {config.quantization}; give it an "
                        "adapter in model.lora.target_modules"
                    )


def _linear(model: nn.Module) -> set[nn.Module]:
    """The linear layers but the output head."""
    linear = {m for m in model.modules() if isinstance(m, (nn.Linear, Conv1D))}
    return linear - {model.get_output_embeddings()}


def _quantizable(model: nn.Module) -> list[nn.Linear]:
    """The layers that model.quantization concerns."""
    head = model.get_output_embeddings()
    return [m for m in model.modules() if isinstance(m, nn.Linear) and m is not head]


def _freeze_others(model: nn.Module, patterns: list[str]) -> None:
    names: dict[nn.Parameter, list[str]] = {}  # several for tied weights
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    for pattern in patterns:
        known = [name for of_one in names.values() for name in of_one]
        if not any(re.search(pattern, name) for name in known):
            raise UserError(f"model.trainable: no parameter matches {_unknown(pattern, known)}")
    for parameter, of_one in names.items():
        parameter.requires_grad_(any(re.search(p, name) for p in patterns for name in of_one))


def _unknown(wanted: str, names: Iterable[str]) -> str:
    """`wanted`, and what it may have meant: parts of dotted names."""
    parts = dict.fromkeys(part for name in names for part in name.split(".")[::-1])
    known = [part for part in parts if not part.isdigit()]
    near = difflib.get_close_matches(wanted.rpartition(".")[2], known, n=3, cutoff=0.6)
    if near:
        return f"{wanted}; did you mean {' or '.join(near)}?"
    return f"{wanted}; its names have {listed(known, NAMES_SHOWN)}"
