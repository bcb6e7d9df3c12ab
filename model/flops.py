"""Floating-point operations (FLOPs) that a training step needs, from the architecture and the real
lengths of the step's examples.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from torch import nn
from transformers import PretrainedConfig

from model.architecture import layer_widths, text_config_of

NOT_MULTIPLIED = {"original_module", "lora_embedding_A"}
"""Parts of names: peft's frozen copy of a module that is trained as a whole, and a look-up."""


@dataclass(frozen=True)
class ModelFlops:
    """FLOPs of a model, forward and backward.

    They are the "model FLOPs" of PaLM (arXiv:2204.02311, appendix B) and Megatron-LM
    (arXiv:2104.04473, section 5.1), which torchtitan counts too: what the mathematics needs,
    whatever the hardware does. Recomputed activations count once; padding, norms, activation
    functions and the optimizer do not count.

        2 per weight of a matrix and token: a multiplication and an addition, forward
        2 more for the gradient of the matrix's input, if anything before it is trained
        2 more for the gradient of the matrix, if it is trained

    So a trained weight has 6, and a frozen one behind an adapter 4. Of the experts' weights, a
    token multiplies num_experts_per_tok / num_experts. Where PaLM has 6 per parameter and token,
    and 12 per layer, head, element of a head and pair of tokens, three things are closer to the
    need. The input embedding is a look-up and has none. The output head counts for supervised
    tokens alone, since no other logits are computed. Attention counts for the pairs of tokens that
    it allows, which are causal and within the sliding window: forward 2 x heads x (size of a key +
    size of a value) per pair and layer, and twice as much backward. Layers without pairs, such as
    linear attention, have their matrices alone.
    """

    token: float
    """Of all matrices but the output head, per token."""
    supervised_token: float
    """Of the output head, per token that is a target of the loss."""
    pair: Mapping[int | None, float]
    """Of attention, per pair of tokens, summed over the layers of this sliding window (tokens; None
    if all earlier ones are seen).
    """

    def of_pairs(
        self, tokens: float, supervised_tokens: float, pairs: Mapping[int | None, float]
    ) -> float:
        """FLOPs for these numbers of tokens, and of pairs by sliding window."""
        attention = sum(flops * pairs[window] for window, flops in self.pair.items())
        return self.token * tokens + self.supervised_token * supervised_tokens + attention

    def of_examples(self, lengths: np.ndarray, supervised_tokens: float) -> float:
        """FLOPs for examples of these lengths, int [examples]."""
        pairs = {window: causal_pairs(lengths, window) for window in self.pair}
        return self.of_pairs(float(lengths.sum()), supervised_tokens, pairs)


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
    active = layer_widths(model_config)[-1]
    token, is_reached = 0.0, False
    for parameter, uses in _parameters(body, active, without=head):
        token += _per_token(parameter, uses, is_reached)
        is_reached = is_reached or parameter.requires_grad
    supervised = sum(_per_token(p, uses, is_reached) for p, uses in _parameters(head, active))

    windows = _windows(text)
    is_reached = any(p.requires_grad for p in skeleton.get_input_embeddings().parameters())
    pair: Counter[int | None] = Counter()
    for block, window in zip(_blocks(body, len(windows)), windows, strict=True):
        is_reached = is_reached or any(p.requires_grad for p in block.parameters())
        if window != 0:
            pair[window] += 2 * _pair_width(text, model_config) * (3 if is_reached else 1)
    return ModelFlops(token, supervised, dict(pair))


def _per_token(parameter: nn.Parameter, uses: float, is_reached: bool) -> float:
    return uses * parameter.numel() * (2 + 2 * is_reached + 2 * parameter.requires_grad)


def _parameters(
    module: nn.Module, active: float, without: nn.Module | None = None
) -> Iterator[tuple[nn.Parameter, float]]:
    """Each parameter in order, and how many times a token is multiplied by it, on average.

    Args:
        active: experts that a token visits.
    """
    left_out = set(without.modules()) if without is not None else set()
    lists = [m.experts for m in module.modules() if hasattr(m, "experts")]
    share = {
        m: active / len(experts)
        for experts in lists
        if isinstance(experts, nn.ModuleList)  # of code that comes with a model
        for m in experts.modules()
    }
    for m in module.modules():  # adapters of packed experts: matrices of all experts side by side
        if hasattr(m, "parameter_name"):
            part = active / m.num_experts if m.num_experts > 1 else 1.0
            share |= dict.fromkeys([*m.lora_A.modules(), *m.lora_B.modules()], part)
    for path, part in module.named_modules():
        if part in left_out:
            continue
        own = dict(part.named_parameters(recurse=False))
        is_packed = any(p.dim() == 3 for p in own.values()) and hasattr(part, "num_experts")
        for name, parameter in own.items():
            if isinstance(part, nn.Embedding) or NOT_MULTIPLIED & {name, *path.split(".")}:
                yield parameter, 0.0
            elif is_packed:  # [experts, rows, columns], beside biases [experts, rows]
                yield parameter, active / part.num_experts if parameter.dim() == 3 else 0.0
            else:
                yield parameter, share.get(part, 1.0) if parameter.dim() > 1 else 0.0


def _blocks(body: nn.Module, layers: int) -> list[nn.Module]:
    """The blocks in order; where they cannot be told, the whole model in the place of each."""
    lists = (m for m in body.modules() if isinstance(m, nn.ModuleList))
    return list(next((m for m in lists if len(m) == layers), [body] * layers))


def _windows(text: PretrainedConfig) -> list[int | None]:
    """The sliding window of each layer; None: without one, 0: no attention over pairs."""
    layers, window = int(text.num_hidden_layers), getattr(text, "sliding_window", None)
    types = getattr(text, "layer_types", None) or ["sliding_attention"] * layers
    chunk = getattr(text, "attention_chunk_size", None)
    of_type = {"sliding_attention": window, "full_attention": None, "chunked_attention": chunk}
    return [of_type.get(kind, 0) for kind in types]


def _pair_width(text: PretrainedConfig, model_config: PretrainedConfig) -> float:
    """Of all heads of a layer: size of a key and of a value."""
    of_value = getattr(text, "v_head_dim", None)
    if of_value and (rotated := getattr(text, "qk_rope_head_dim", None)):  # latent attention
        return text.num_attention_heads * (text.qk_nope_head_dim + rotated + of_value)
    _, queries, *_ = layer_widths(model_config)
    return 2 * queries
