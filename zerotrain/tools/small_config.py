"""Sizes of small models of any architecture, for proofs and tests."""

from contextlib import suppress

from transformers import PretrainedConfig

SMALL_SIZES = {
    "hidden_size": 32, "intermediate_size": 64, "ffn_hidden_size": 64, "moe_intermediate_size": 24,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "rotary_dim": 4,
    "qk_rope_head_dim": 8, "num_experts": 4,
    "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 64,
    "query_pre_attn_scalar": 8, "image_size": 28, "mm_tokens_per_image": 4,
    "initializer_range": 0.1, "n_group": 1, "topk_group": 1,
}  # fmt: skip
"""Values of the small copy, for the keys that the model's config has."""


def small_config(model_config: PretrainedConfig) -> PretrainedConfig:
    """Edit and return a config: SMALL_SIZES, one layer of each kind, at least two, no dropout."""
    text = model_config.get_text_config()
    layers = text.num_hidden_layers
    few = max(2, len(set(getattr(text, "layer_types", None) or [])))
    parts = [p for p in vars(model_config).values() if isinstance(p, PretrainedConfig)]
    for part in (model_config, *parts):
        for key, value in part.to_dict().items():
            if key == "mlp_only_layers":  # numbers of layers without experts
                setattr(part, key, [])
            elif isinstance(value, list) and len(value) == layers:  # one value per layer
                kinds = list(dict.fromkeys(value)) if key.endswith("layer_types") else value
                setattr(part, key, (kinds * few)[:few])
            elif isinstance(value, float) and any(n in key for n in ("dropout", "pdrop", "jitter")):
                setattr(part, key, 0.0)
        heads = [getattr(part, f"num_{kind}_heads", None) for kind in ("key_value", "attention")]
        for key, value in SMALL_SIZES.items():
            with suppress(AttributeError, RuntimeError):  # derived, or different by layer
                if isinstance(getattr(part, key, None), int | float):  # some have lists
                    setattr(part, key, value)
        if heads[0] and heads[0] == heads[1]:
            part.num_key_value_heads = part.num_attention_heads
        if hasattr(part, "num_hidden_layers"):
            part.num_hidden_layers = few
    rope = getattr(text, "rope_parameters", None) or {}
    if "mrope_section" in rope:  # numbers of frequencies that encode time, row and column
        half = int(SMALL_SIZES["head_dim"] * rope.get("partial_rotary_factor", 1)) // 2
        rope["mrope_section"] = [half - 2 * (half // 3), half // 3, half // 3]
    return model_config
