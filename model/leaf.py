"""Modules whose parameters ZeRO-3 gathers together."""

from typing import Any

import torch
from deepspeed.utils import set_z3_leaf_module
from torch import nn


def gather_at_once(module: nn.Module) -> None:
    """Have ZeRO-3 gather all parameters of a module when it is called, rather than those of each
    submodule when that is called. Without effect below stage 3, and after deepspeed.initialize.

    DeepSpeed then reduces the module's gradients once autograd has the gradient of its input, and
    where the input needs none, because everything before is frozen, before there is any gradient:
    it would reduce zeros (register_full_backward_hook). So the input is made to need one.
    """

    def require_gradient(_module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if not args or not torch.is_grad_enabled() or args[0].requires_grad:
            return None
        if not any(p.requires_grad for p in module.parameters()):
            return None
        return (args[0].detach().requires_grad_(), *args[1:])

    module.register_forward_pre_hook(require_gradient)
    set_z3_leaf_module(module, True)
