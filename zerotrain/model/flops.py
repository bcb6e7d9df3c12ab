"""Floating-point operations (FLOPs) that a training step needs, from the architecture and the real
lengths of the step's examples.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from torch import nn
from transformers import PretrainedConfig

from zerotrain.model.architecture import layer_widths, text_config_of

NOT_MULTIPLIED = {"original_module", "lora_embedding_A"}
"""Parts of names: peft's frozen copy of a module that is trained as a whole, and a look-up."""


@dataclass(frozen=True)
class ModelFlops:
    """FLOPs of a model, forward and backward.

    They are the "model FLOPs" of PaLM (arXiv:2204.02311, appendix B) and Megatron-LM
    (arXiv:2104.04473, section 5.1), which torchtitan counts too: what the mathematics needs,
    whatever the hardware does. Per token and weight of a matrix 2 forward, 2 for the gradient of
    its input if anything before it is trained, and 2 for its own gradient if it is trained: so 6
    per trained weight, and 4 per frozen one behind an adapter. Of the experts' weights, a token
    multiplies num_experts_per_tok / num_experts. The output head counts for supervised tokens
    alone. Attention counts for the pairs of tokens that it allows, causal and within the sliding
    window: 6 x heads x (size of a key + size of a value) per pair and layer. Recomputed activations
    count once; padding, look-ups, norms, activation functions and the optimizer do not count.
    """

    token: float
    """Of all matrices but the output head, per token."""
    supervised_token: float
    """Of the output head, per token that is a target of the loss."""
    pair: Mapping[int | None, float]
    """Of attention, per pair of tokens, summed over the layers of this sliding window (tokens; None
    if all earlier ones are seen).
    """

    def of_examples(self, lengths: np.ndarray, supervised_tokens: float) -> float:
        """FLOPs for examples of these lengths, int [examples]."""
        pairs = sum(flops * causal_pairs(lengths, window) for window, flops in self.pair.items())
        return self.token * lengths.sum() + self.supervised_token * supervised_tokens + pairs


def causal_pairs(lengths: np.ndarray, window: int | None) -> float:
    """Pairs of a token and one that it sees: itself and those before it, at most `window` in all.

    Args:
        lengths: tokens of each example, int [examples].
    """
    length = lengths.astype(np.float64)
    seen = length if window is None else np.minimum(length, window)
    return float((seen * (seen + 1) / 2 + (length - seen) * seen).sum())


def count_flops(skeleton: nn.Module, model_config: PretrainedConfig) -> ModelFlops:
    """The FLOPs of a model as it is trained.

    What is before a matrix is taken from the order of the model's parameters, which is wrong for
    the few that stand beside the first trained one.

    Args:
        skeleton: the model on the meta device, with requires_grad as in training.
    """
    head, text = skeleton.get_output_embeddings(), text_config_of(model_config)
    # of a multimodal model, the part that is used for text
    body = skeleton if text is model_config else skeleton.get_decoder()
    _, queries, _, _, active = layer_widths(model_config)
    head_modules = set(head.modules())
    token, is_reached = 0.0, False
    for name, module in body.named_modules():
        if module in head_modules:
            continue
        token += _per_token(name, module, active, is_reached)
        is_reached = is_reached or any(p.requires_grad for p in module.parameters(recurse=False))
    supervised = sum(_per_token(n, m, active, is_reached) for n, m in head.named_modules())

    key_and_value = 2 * queries  # of all heads
    if rotated := getattr(text, "qk_rope_head_dim", None):  # latent attention
        per_head = text.qk_nope_head_dim + rotated + text.v_head_dim
        key_and_value = text.num_attention_heads * per_head
    pair = Counter(window for window in _windows(text) if window != 0)
    return ModelFlops(
        token, supervised, {window: 6 * key_and_value * layers for window, layers in pair.items()}
    )


def _per_token(name: str, module: nn.Module, active: float, is_reached: bool) -> float:
    """Of a module's own parameters.

    Args:
        active: experts that a token visits.
        is_reached: whether anything before it is trained.
    """
    flops, own = 0.0, dict(module.named_parameters(recurse=False))
    is_packed = any(p.dim() == 3 for p in own.values())  # [experts, rows, columns], beside biases
    for parameter_name, p in own.items():
        skipped = NOT_MULTIPLIED & {parameter_name, *name.split(".")}
        if isinstance(module, nn.Embedding) or skipped or p.dim() < 2:
            continue
        uses = 1.0
        if is_packed:
            uses = active / len(p) if p.dim() == 3 else 0.0
        flops += uses * p.numel() * (2 + 2 * is_reached + 2 * p.requires_grad)
    return flops


def _windows(text: PretrainedConfig) -> list[int | None]:
    """The sliding window of each layer; None: without one, 0: no attention over pairs."""
    layers, window = int(text.num_hidden_layers), getattr(text, "sliding_window", None)
    types = getattr(text, "layer_types", None) or ["sliding_attention"] * layers
    chunk = getattr(text, "attention_chunk_size", None)
    of_type = {"sliding_attention": window, "full_attention": None, "chunked_attention": chunk}
    return [of_type.get(kind, 0) for kind in types]
