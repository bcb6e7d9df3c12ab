"""Mixtures of experts that cannot be trained.

transformers 5 packs the experts of a layer into three-dimensional parameters. They have a gradient
on every rank, zero for an expert without tokens, and ZeRO-3 gathers them for the layer at once.
"""

from torch import nn

from zerotrain.runtime.errors import UserError


def refuse_expert_lists(model: nn.Module) -> None:
    """Raise UserError for experts that are modules of their own, as in code that comes with a
    model: ranks choose different ones, but have to gather and to reduce the same parameters.
    """
    for module in model.modules():
        if isinstance(getattr(module, "experts", None), nn.ModuleList):
            raise UserError(
                f"model.name_or_path: {type(module).__name__} of this model has experts that are "
                "modules of their own, which ZeRO does not train right; use a model whose experts "
                "are packed, as in transformers"
            )
