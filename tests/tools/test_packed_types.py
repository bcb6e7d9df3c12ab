"""Packed examples of each listed type equal single ones, and router losses are transformers' own.
pytest tests/tools/test_packed_types.py

Types that the installed version of transformers does not have are left out.
"""

import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import model_type_to_module_name
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from zerotrain.model.architecture import auto_class
from zerotrain.model.mixers import KERNELS, keep_apart
from zerotrain.model.packing import ATTENTION_TYPES, MIXER_TYPES, PACKED_EXAMPLES
from zerotrain.model.probes import check_packing
from zerotrain.runtime.errors import UserError
from zerotrain.tools.small_config import small_config
from zerotrain.training.router_loss import RouterLoss

torch.set_num_threads(1)  # for models this small, threads cost more than they save

LAYERS = {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2}
EXPERTS = {"n_group": 1, "topk_group": 1, "n_routed_experts": 4, "num_experts_per_tok": 2}
HEADS = {"qk_nope_head_dim": 8, "v_head_dim": 8, "kv_lora_rank": 16, "qk_head_dim": 16}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1}
OPTIONAL = {
    "sliding_window": 5, "vocab_size_per_layer_input": 320, "num_dense_layers": 1,
    "linear_num_heads": 4, "linear_head_dim": 8, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "mamba_d_state": 16, "mamba_chunk_size": 16, "ssm_state_size": 16, "chunk_size": 16,
}  # fmt: skip
"""Sizes that not every type has. The defaults of mixers take seconds."""
SIZES = {
    "axk1": EXPERTS,
    "bamba": MAMBA,
    "deepseek_v2": EXPERTS,
    "dots1": {**EXPERTS, "n_shared_experts": 1},
    "falcon_h1": {**MAMBA, "mamba_d_ssm": 64},
    "gemma4_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
    },
    "granitemoehybrid": MAMBA,
    "longcat_flash": HEADS,
    "mamba2": {"num_heads": 4, "head_dim": 16, "n_groups": 1},
    "nemotron_h": {"mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 1},
    "zamba2": {"n_mamba_heads": 4, "mamba_headdim": 16, "mamba_ngroups": 1},
}  # fmt: skip
"""Sizes of small models that do not follow from SMALL_SIZES."""


def small_model(kind, **more):
    """A small model of a type, with a sliding window where the type has one."""
    layers = LAYERS if kind in ("lfm2", "lfm2_moe") else {}
    for sizes in ({}, {"head_dim": 8, "num_key_value_heads": 2}):
        with suppress(Exception):  # a model's own code can raise anything
            config = small_config(AutoConfig.for_model(kind, **sizes, **layers))
            text = config.get_text_config()
            known = {key: value for key, value in OPTIONAL.items() if hasattr(text, key)}
            values = {"vocab_size": 320, "pad_token_id": 0, **known, **SIZES.get(kind, {}), **more}
            for key, value in values.items():
                setattr(text, key, value)
            torch.manual_seed(0)
            model = auto_class(config).from_config(config)
            for weight in model.parameters():
                if weight.dim() > 1:
                    torch.nn.init.normal_(weight, std=0.1)
            if not more:
                model.set_attn_implementation(PACKED_EXAMPLES)
            assert model.config.model_type == kind
            return model
    raise AssertionError(f"{kind}: no small model")


def test_packed_examples_of_each_listed_type_equal_single_ones():
    kinds = [*ATTENTION_TYPES.split(), *MIXER_TYPES.split()]
    assert len(kinds) == len(set(kinds))
    for kind in set(kinds) & set(CONFIG_MAPPING.keys()):
        model = small_model(kind)
        if kind in MIXER_TYPES.split():
            with pytest.raises(UserError, match="packed examples"):
                check_packing(model, range(3, 320))
        keep_apart(model)
        check_packing(model, range(3, 320))


# --------------------------------------------------------------------------------------------------
# Router losses

DBRX = {
    "d_model": 32, "n_heads": 4, "n_layers": 2, "vocab_size": 320, "output_router_logits": True,
    "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8},
    "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
}  # fmt: skip


def has_router_loss(kind):
    if f"{kind}_text" in CONFIG_MAPPING:  # the same layers, with a tower for pictures
        return False
    name = model_type_to_module_name(kind)
    code = Path(transformers.__file__).parent / "models" / name / f"modeling_{name}.py"
    return code.exists() and "= load_balancing_loss_func(" in code.read_text()


def test_the_router_loss_of_each_type_is_transformers_own_or_refused():
    kinds = {*filter(has_router_loss, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES), "llama4_text"}
    kinds -= {"qwen4_exp_text"}  # It has no small model.
    assert len(kinds) > 25
    for kind in kinds:
        if kind == "dbrx":
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **DBRX))
        else:
            model = small_model(kind, output_router_logits=True, is_moe=True)
        loss = RouterLoss(model)
        assert loss.coefficient > 0, kind
        # Doge's routers choose by two keys, and Llama 4 computes no router loss.
        if kind in ("doge", "llama4_text"):
            with pytest.raises(UserError, match="output_router_logits to false"):
                loss.check(model, range(3, 320))
            model.config.output_router_logits = False
            RouterLoss(model).check(model, range(3, 320))
        else:
            loss.check(model, range(3, 320))


# --------------------------------------------------------------------------------------------------
# Kernels


def stand_in(function, keyword, axis):
    """A kernel that keeps examples apart only if it gets their bounds."""

    def kernel(*args, **kwargs):
        bounds = kwargs.pop(keyword, None)
        if keyword == "cu_seqlens" and bounds is not None:
            assert kwargs["cu_seqlens_cpu"].equal(bounds)
        kwargs = {k: v for k, v in kwargs.items() if not k.startswith(("seq_idx", "cu_seq"))}
        lengths = [args[0].shape[axis]]
        if bounds is not None:
            is_numbers = keyword == "seq_idx"
            assert bounds.dtype == (torch.int32 if is_numbers else torch.int64)
            found = bounds[0].unique_consecutive(return_counts=True)[1] if is_numbers else bounds
            lengths = (found if is_numbers else bounds.diff()).tolist()

        def split(value):
            is_sequence = isinstance(value, torch.Tensor) and value.dim() > 2
            return value.split(lengths, axis) if is_sequence else [value] * len(lengths)

        names = list(kwargs)
        parts = zip(*map(split, [*args, *kwargs.values()]), strict=True)
        outputs = []
        for part in parts:
            options = dict(zip(names, part[len(args) :], strict=True))
            output = function(*part[: len(args)], **options)
            outputs.append(output[0] if isinstance(output, tuple) else output)
        joined = torch.cat(outputs, axis)
        return (joined, None) if "delta" in function.__name__ else joined

    return kernel


@pytest.mark.parametrize("types", KERNELS)
def test_kernels_get_the_bounds_that_their_family_needs(types, monkeypatch):
    """With fla alone the convolution has no kernel."""
    packages, keywords = KERNELS[types]
    for kind in types.split():
        model = small_model(kind)
        module = sys.modules[type(model).__module__]
        for name, keyword, axis in (
            ("causal_conv1d_fn", "seq_idx", 2),
            ("torch_chunk_gated_delta_rule", "cu_seqlens", 1),
            ("chunk_kimi_delta_attention", "cu_seqlens", 1),
            ("mamba2_chunk_scan", "seq_idx", 1),
        ):
            function = getattr(module, name, None)
            if function and ("conv" not in name or "causal_conv1d" in packages):
                kernel = stand_in(function.__wrapped__, keyword, axis)
                monkeypatch.setattr(module, name, kernel)
        with pytest.raises(UserError, match="packed examples"):
            check_packing(model, range(3, 320))
        keep_apart(model, keywords.split())
        check_packing(model, range(3, 320))
