"""Packed examples in mixers: each example starts from an empty state.

Hybrid models (Qwen3.5, Nemotron-H, LFM2 and others) have mixers: linear attention, state-space
models and convolutions, which carry a state from token to token. In a packed row it would run on
into the next example. Hooks prevent that, and all other layers keep the packed row of T tokens:

    model(input_ids)    begin()  makes the layout of the micro-batch. It stays until the next one,
                                 since activations are recomputed in the backward pass
      mixer(hidden)     cut()    [1, T, h] -> one example per row, [rows, length, h]
                        join()   the outputs of all calls -> [1, T, h]

The rows are padded at their ends. A mixer is causal: its output for a token depends on this token
and the ones before it. Padding comes after all tokens of its example, so it changes none of their
outputs. join() drops the outputs at padding, so no gradient comes from there either.

One call would pad all examples to the longest. So examples of similar length share a call. The
number of calls is always the same, though some may have padding only: at ZeRO-3 a call may gather
weights, and all ranks do that together, however many examples each of them has.

On CUDA with the kernels of the model's family the only call has the packed row, with zeros after
each example, and the kernels get the bounds of examples. No GPU has run this; a test holds what
stand-ins for the kernels get.
"""

from collections.abc import Sequence
from importlib.util import find_spec
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from zerotrain.model.packing import Examples, current_examples

KERNELS = {
    "olmo_hybrid qwen3_5_moe_text qwen3_5_text qwen3_next": ("fla", "cu_seq_lens_q cu_seqlens_cpu"),
    "bailing_hybrid kimi_linear": ("fla causal_conv1d", "cu_seqlens cu_seqlens_cpu seq_idx"),
    "bamba falcon_h1 granitemoehybrid nemotron_h zamba2": ("mamba_ssm causal_conv1d", "seq_idx"),
    "lfm2 lfm2_moe": ("causal_conv1d", "seq_idx"),
}
"""Values of model_type -> packages with their kernels, and the keywords of a mixer with kernels.
Without one of them, or with other names, examples leak without an error. Only cu_seqlens_cpu may be
missing: fla then asks the device for the bounds. transformers drops what a kernel does not take.
"""
HALVINGS = 3
"""Without kernels a mixer is called 2^3 times for a micro-batch."""
GAP = 3
"""Zeros after each example if there are kernels: the past that a convolution sees. A Gated DeltaNet
does not tell its convolution where examples end, which may have no kernel. It has no biases.
"""


def kernel_keywords(model: nn.Module) -> list[str]:
    """Return the keywords for the kernels of a model's mixers; none without a GPU or kernels."""
    for types, (packages, keywords) in KERNELS.items():
        if model.config.model_type in types.split() and all(map(find_spec, packages.split())):
            return keywords.split() if model.device.type == "cuda" else []
    return []


def keep_apart(model: nn.Module, keywords: Sequence[str] = ()) -> None:
    """Register hooks by which a model's mixers compute packed examples one by one.

    To be called after deepspeed.initialize: then cut() runs after ZeRO-3 has gathered a mixer's
    weights and join(), with prepend, before it releases them.

    Args:
        keywords: the result of kernel_keywords.
    """
    layout: Layout | None = None
    padded = torch.empty(0)

    def begin(_model: nn.Module, _args: tuple) -> None:
        nonlocal layout
        examples = current_examples.get()
        layout = examples and make_layout(examples, keywords)

    @torch.compiler.disable
    def cut(_mixer: nn.Module, args: tuple, inputs: dict[str, Any]) -> tuple | None:
        nonlocal padded
        if layout is None:
            return None
        [hidden] = args or [inputs["hidden_states"]]
        padded = F.pad(hidden[0], (0, 0, 0, 1))  # [T + 1, h], zeros at T
        first = {"hidden_states": padded[layout.calls[0]], "attention_mask": None}
        return (), inputs | layout.bounds | first

    @torch.compiler.disable
    def join(mixer: nn.Module, _args: tuple, inputs: dict[str, Any], output: Any) -> Any:
        if layout is None:
            return None
        others = [mixer.forward(**inputs | {"hidden_states": padded[c]}) for c in layout.calls[1:]]
        return torch.cat([x.flatten(0, 1) for x in (output, *others)])[layout.order][None]

    model.register_forward_pre_hook(begin)
    for mixer in model.modules():
        if any(isinstance(child, nn.Conv1d) for child in mixer.children()):
            mixer.register_forward_pre_hook(cut, with_kwargs=True)
            mixer.register_forward_hook(join, with_kwargs=True, prepend=True)


class Layout(NamedTuple):
    """How mixers compute one packed micro-batch of T tokens."""

    calls: list[torch.Tensor]
    """Positions in the packed row, int64 [rows, length] for each call, T at padding."""
    order: torch.Tensor
    """Where each token is in all calls, int64 [T]."""
    bounds: dict[str, torch.Tensor]
    """Bounds of examples, for kernels."""


def make_layout(examples: Examples, keywords: Sequence[str]) -> Layout:
    """Return the layout of a micro-batch. Nothing waits for the device.

    Args:
        keywords: names of bounds; empty without kernels.
    """
    tokens = sum(examples.lengths)
    with examples.ends.device:
        *spans, padding = torch.arange(tokens + 1).split([*examples.lengths, 1])
        if keywords:
            calls = [torch.cat([F.pad(span, (0, GAP), value=tokens) for span in spans])[None]]
        else:
            groups = [sorted(spans, key=len, reverse=True)]
            for _ in range(HALVINGS):
                groups = [half for group in groups for half in halve(group)]
            calls = [pad_sequence(group or [padding], True, tokens) for group in groups]
        order = torch.cat([call.flatten() for call in calls]).argsort()[:tokens]
        ends = examples.ends + GAP * torch.arange(len(examples.ends))
        numbers = torch.bucketize(torch.arange(calls[0].numel()), ends[1:], right=True)
    numbers = numbers[None].int()
    lengths = [length + GAP for length in examples.lengths]
    of_cpu = torch.tensor([0, *accumulate(lengths)], device="cpu")
    bounds = dict.fromkeys(keywords, ends)
    for name, value in (("seq_idx", numbers), ("cu_seqlens_cpu", of_cpu)):
        if name in bounds:
            bounds[name] = value
    return Layout(calls, order, bounds)


def halve(spans: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Cut a list of spans, the longest first, where it saves most padding."""

    def saved(cut: int) -> int:
        return (len(spans[0]) - len(spans[cut])) * (len(spans) - cut)

    cut = max(range(len(spans)), key=saved, default=0)
    return spans[:cut], spans[cut:]
