"""The weights that a checkpoint stands for: those that were trained, frozen ones from the files of
the base model, and adapters added to these.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from checkpoint.shards import Shards
from checkpoint.state import RunIdentity
from config.schema import LoraConfig, ModelConfig
from model.base import describe_base, is_same_base
from model.hub import load_pretrained
from model.load import DTYPES, quantized
from model.trained import adapted_parameters, choose_trained
from runtime.errors import UserError, describe

ADAPTER = "default"  # peft's name of the adapters that choose_trained inserts


class MasterWeights(Mapping[str, torch.Tensor]):
    """The fp32 parameters and the persistent buffers of a trained model, by their names in the
    state_dict of a model without adapters, assembled on access. Tied parameters are found under
    each of their names.
    """

    def __init__(
        self, shards: Shards, model: nn.Module, frozen: Mapping[str, torch.Tensor]
    ) -> None:
        """Read the adapters.

        Args:
            model: on the meta device, after insert_adapters.
            frozen: from load_frozen.
        """
        self._shards, self._buffers, self._frozen = shards, shards.buffers(), frozen
        saved, ties = set(filter(shards.holds, shards.names())), {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            ties.setdefault(id(parameter), []).append(name)
        # {name in the model: name in the shards}
        names = {name: name for name in saved}
        for of_one in ties.values():
            if found := saved.intersection(of_one):
                names.update(dict.fromkeys(of_one, min(found)))
        inner = _wrapped(model)
        self._names = {
            plain: saved_as
            for name, saved_as in names.items()
            if (plain := _plain_name(name, inner)) is not None
        }
        adapted = adapted_parameters(model)
        self._adapters = {name: model.get_submodule(layer) for name, layer in adapted.items()}
        weights = {
            f"{layer}.{name}": shards.weight(f"{layer}.{name}")
            for layer in adapted.values()
            for name, _ in model.get_submodule(layer).named_parameters()
            if not name.startswith("base_layer.")
        }
        model.load_state_dict(weights, strict=False, assign=True)
        for name, layer in self._adapters.items():  # peft moves a delta to where the parameter is
            parameter = nn.Parameter(torch.empty(0), requires_grad=False)
            setattr(layer.get_base_layer(), name.rpartition(".")[2], parameter)

    def __getitem__(self, name: str) -> torch.Tensor:
        """The tensor in its shape. Do not modify it."""
        if name in self._buffers:
            return self._buffers[name]
        is_saved = name in self._names
        weight = self._shards.weight(self._names[name]) if is_saved else self._frozen[name]
        if name in self._adapters:
            return weight.float() + self._adapters[name].get_delta_weight(ADAPTER).detach()
        return weight

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys([*self._names, *self._frozen, *self._buffers]))

    def __len__(self) -> int:
        return len({*self._names, *self._frozen, *self._buffers})


def load_frozen(shards: Shards, run: RunIdentity, base: str | None) -> dict[str, torch.Tensor]:
    """The state_dict of the model whose files hold the frozen weights, if the checkpoint does not,
    in the run's precision. Weights that the run had in 4 bits are rounded to those, as adapters
    were trained on them.

    Args:
        base: folder or hub id of that model; default: where the run read it from.

    Raises:
        UserError: it cannot be loaded, or has other weights.
    """
    if not shards.missing():
        return {}
    was = shards.read_from
    name, revision = (base, None) if base else (was["name_or_path"], was["revision"])
    cure = f"give the model that {was['name_or_path']} was during the run with --base"
    load, dtype = AutoModelForCausalLM.from_pretrained, DTYPES[run.precision]
    in_4_bits = run.optimization.get("model.quantization") is not None
    options = {"dtype": dtype, **(quantized(dtype, "cpu") if in_4_bits else {})}
    try:
        model = load_pretrained(load, name, revision=revision, **options)
    except UserError as error:
        raise UserError(f"the frozen weights: {error}; {cure}") from error
    if not is_same_base(was, describe_base(name, revision)):
        raise UserError(f"{name} has other weights than those that were frozen; {cure}")
    return (model.dequantize(dtype) if in_4_bits else model).state_dict()


def insert_adapters(
    model: nn.Module, run: RunIdentity, read_from: Mapping[str, str | None] | None = None
) -> None:
    """Insert the adapters of a run, if it has some, into a model on the meta device.

    Args:
        read_from: Shards.read_from, which the adapters' own config names as their base.

    Raises:
        UserError: the run's settings do not fit the model.
    """
    if run.lora is None:
        return
    of_base = read_from or {"name_or_path": "", "revision": None}
    try:
        config = ModelConfig(
            of_base["name_or_path"], revision=of_base["revision"], lora=LoraConfig(**run.lora)
        )
        with torch.device("meta"):
            choose_trained(model, config)
    except UserError:
        raise
    except Exception as error:  # whatever settings of any content lead to
        raise UserError(
            f"the checkpoint's model.lora cannot be used ({describe(error)}); use another "
            "checkpoint"
        ) from error


def has_own_head(model: nn.Module) -> bool:
    """Whether embeddings or output head have been given weights of their own, so that they are no
    longer tied.
    """
    inner = _wrapped(model)
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    return any(model.get_submodule(name) in ends for name in inner)


def _wrapped(model: nn.Module) -> dict[str, str]:
    """Of a model with adapters: {a module that has one or is trained as a whole: where its weights
    are now}.
    """
    if not hasattr(model, "peft_config"):
        return {}
    from peft.utils import ModulesToSaveWrapper

    inner = {}
    for name, layer in adapted_parameters(model).items():  # the innermost layer comes last
        inner[name.rpartition(".")[0]] = f"{layer}.base_layer"
    for name, module in model.named_modules():
        if isinstance(module, ModulesToSaveWrapper):
            inner[name] = f"{name}.modules_to_save.{ADAPTER}"
    return inner


def _plain_name(name: str, inner: Mapping[str, str]) -> str | None:
    """The name of a parameter in the model without adapters; None if it is not a part of it.

    Args:
        inner: from _wrapped.
    """
    for module, now in inner.items():
        if name.startswith(f"{module}."):
            return module + name.removeprefix(now) if name.startswith(f"{now}.") else None
    return name
