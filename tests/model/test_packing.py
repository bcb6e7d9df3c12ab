"""Packed examples equal the same examples alone.    pytest tests/model/test_packing.py"""

import copy
import inspect
from dataclasses import replace

import numpy as np
import pytest
import torch
from harness.inputs import SMALL_SIZES, read_config
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    DogeConfig,
    FalconConfig,
    Gemma2Config,
    GPTBigCodeConfig,
    LlamaConfig,
    MambaConfig,
    Phi3Config,
    PhimoeConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    RobertaConfig,
)

from zerotrain.data.loader import MicroBatch
from zerotrain.model import packing
from zerotrain.model.architecture import meta_model
from zerotrain.model.packing import PACKED_EXAMPLES, attend_within, resolve_batching
from zerotrain.model.probes import check_causal, check_packing
from zerotrain.runtime.errors import UserError

torch.set_num_threads(1)  # for models this small, threads cost more than they save

SIZES = {**SMALL_SIZES, "head_dim": 8, "max_position_embeddings": 256, "pad_token_id": 0}
MIXED = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
FAMILIES = {
    "llama, grouped heads": LlamaConfig(**SIZES),
    "qwen2, sliding window": Qwen2Config(**SIZES, **MIXED, use_sliding_window=True),
    "deepseek_v3, two head sizes": DeepseekV3Config(
        **{**SIZES, "num_key_value_heads": 4}, kv_lora_rank=8, q_lora_rank=8, qk_nope_head_dim=8,
        qk_rope_head_dim=8, v_head_dim=8, first_k_dense_replace=2,
    ),
    "phimoe, sliding window that only the mask has": PhimoeConfig(
        **SIZES, **EXPERTS, sliding_window=5
    ),
    "qwen2_moe, sliding window that only the mask has": Qwen2MoeConfig(
        **SIZES, **MIXED, num_experts=4, num_experts_per_tok=2, use_sliding_window=True,
        moe_intermediate_size=16, shared_expert_intermediate_size=16, max_window_layers=1,
    ),
    "gpt_bigcode, positions that only the mask has": GPTBigCodeConfig(
        vocab_size=320, n_embd=32, n_layer=2, n_head=4, n_positions=256, attn_pdrop=0, embd_pdrop=0,
        resid_pdrop=0,
    ),
}  # fmt: skip


def models(name, **options):
    """The same random weights with the model's own attention and with ours."""
    torch.manual_seed(0)
    own = AutoModelForCausalLM.from_config(copy.deepcopy(FAMILIES[name]))
    for parameter in own.parameters():  # far from uniform attention
        torch.nn.init.normal_(parameter, std=0.1)
    ours = AutoModelForCausalLM.from_config(
        copy.deepcopy(FAMILIES[name]), attn_implementation=PACKED_EXAMPLES
    )
    ours.load_state_dict(own.state_dict())
    return own, ours


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_packed_examples_equal_each_alone(name, checkpointing):
    """Logits and gradients in fp32, with the windows shorter than the examples."""
    own, ours = models(name)
    lengths = [12, 7, 1, 15]
    ids = torch.randint(3, 320, (1, sum(lengths)), generator=torch.Generator().manual_seed(1))
    position_ids = torch.cat([torch.arange(n) for n in lengths])[None]
    if checkpointing:
        ours.gradient_checkpointing_enable({"use_reentrant": False})
    ours.train()
    batch = MicroBatch.of(ids.numpy(), ids.numpy() < 0, position_ids=position_ids.numpy())
    with attend_within(ours, batch) as inputs:
        packed = ours(input_ids=ids, use_cache=False, **inputs).logits
    alone = [own(input_ids=part, use_cache=False).logits for part in ids.split(lengths, 1)]
    alone = torch.cat(alone, 1)
    weights = torch.randn(packed.shape, generator=torch.Generator().manual_seed(2))
    for logits in (packed, alone):
        (logits * weights).sum().backward()
    assert (packed - alone).abs().max() < 1e-6 * alone.abs().max()
    expected = dict(own.named_parameters())
    largest = max(p.grad.abs().max() for p in own.parameters() if p.grad is not None)
    for parameter_name, parameter in ours.named_parameters():
        if expected[parameter_name].grad is not None:  # some experts may have no token
            difference = (parameter.grad - expected[parameter_name].grad).abs().max()
            assert difference < 1e-6 * largest, parameter_name
    check_causal(ours, range(3, 320))
    check_packing(ours, range(3, 320))
    assert ours.config._attn_implementation == PACKED_EXAMPLES


# --------------------------------------------------------------------------------------------------
# The kernel of GPUs


def attend(window, device, dtype, size):
    """The output of attention with two heads per key, and the gradients of its inputs."""
    lengths = [12, 7, 1, 150]
    generator, model = torch.Generator().manual_seed(0), models("llama, grouped heads")[1]
    layer = model.model.layers[0].self_attn
    states = [
        torch.randn(1, heads, 170, size, generator=generator).to(device, dtype).requires_grad_()
        for heads in (4, 2, 2)
    ]
    scale = 1.2 * size**-0.5  # not the default, 1 * size**-0.5
    ends = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device=device)
    examples = packing.Examples(lengths, ends, None, window)
    output, _ = packing.packed_attention(layer, *states, examples, scaling=scale)
    output.square().sum().backward()
    return [output.detach(), *(state.grad for state in states)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="the varlen kernel needs a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize("size", [16, 96, 128, 256])
def test_the_varlen_kernel_equals_attention_per_example(window, dtype, size, monkeypatch):
    calls, varlen_attn = [], packing.varlen_attn
    monkeypatch.setattr(
        packing, "varlen_attn", lambda *a, **k: calls.append(a) or varlen_attn(*a, **k)
    )
    found = attend(window, "cuda", dtype, size)
    assert len(calls) == 1
    for one, other in zip(found, attend(window, "cpu", torch.float32, size), strict=True):
        assert (one.cpu().float() - other).norm() < 2e-2 * other.norm()


@pytest.mark.parametrize("names", ["", "enable_gqa seqused_k block_table num_splits"])
def test_the_varlen_kernels_of_torch_2_11_and_newer_are_called_as_they_are(names, monkeypatch):
    """They differ in their keyword parameters; no two packed examples are of the same one."""
    parameter = inspect.Parameter
    signature = inspect.Signature([
        *(parameter(x, parameter.POSITIONAL_ONLY) for x in "qkvabcd"),
        *(parameter(x, parameter.KEYWORD_ONLY, default=None)
          for x in f"return_aux scale window_size {names}".split()),
    ])  # fmt: skip

    def kernel(*args, **kwargs):
        assert signature.bind(*args, **kwargs).arguments["window_size"] == (4, 0)
        assert args[3:] == (ends, ends, 7, 7) and ends.dtype == torch.int32
        return args[0]  # [tokens, heads, size]

    kernel.__signature__ = signature
    monkeypatch.setattr(packing, "varlen_attn", kernel)
    ends = torch.tensor([0, 3, 10], dtype=torch.int32)
    query, *keys = (torch.randn(1, heads, 10, 16) for heads in (4, 2, 2))
    examples = packing.Examples([3, 7], ends, None, 5)
    output = packing._varlen_attention(query, *keys, examples, 0.5)
    assert torch.equal(output, query.transpose(1, 2))


# --------------------------------------------------------------------------------------------------
# Which models are packed


@pytest.fixture
def resolve(tiny_config):
    config = read_config(tiny_config())

    def resolve(
        architecture, device="cpu", precision="fp32", batching="auto", attention=None, sequence=1
    ):
        """batching, attention implementation and reason"""
        asked = replace(
            config,
            data=replace(config.data, batching=batching),
            model=replace(config.model, attn_implementation=attention),
            train=replace(config.train, precision=precision),
        )
        skeleton = meta_model(copy.deepcopy(architecture), False)
        chosen = skeleton.config._attn_implementation
        resolved, why = resolve_batching(asked, skeleton, device, sequence)
        assert skeleton.config._attn_implementation == chosen  # the probe has left no trace
        return resolved.data.batching, resolved.model.attn_implementation, why

    return resolve


def test_auto_packs_where_no_score_between_examples_is_computed(resolve, monkeypatch):
    for name, architecture in FAMILIES.items():
        assert resolve(architecture)[:2] == ("packed", PACKED_EXAMPLES), name
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    llama = FAMILIES["llama, grouped heads"]
    assert resolve(llama, "cuda", "bf16")[:2] == ("packed", PACKED_EXAMPLES)
    batching, attention, why = resolve(llama, "cuda", "fp32")
    assert (batching, attention) == ("bucketed", None) and why.startswith("varlen attention")


def test_an_attention_that_is_asked_for_stays(resolve):
    llama = FAMILIES["llama, grouped heads"]
    assert resolve(llama, attention="eager")[:2] == ("bucketed", "eager")
    for kernel in ("flash_attention_2", "flex_attention"):
        assert resolve(llama, "cuda", "bf16", attention=kernel)[:2] == ("packed", kernel)
    with pytest.raises(UserError):
        resolve(llama, attention="eager", batching="packed")


def test_sequences_that_cannot_be_shared_are_refused(resolve):
    llama = FAMILIES["llama, grouped heads"]
    assert resolve(llama, sequence=2, batching="bucketed")[:2] == ("bucketed", PACKED_EXAMPLES)
    with pytest.raises(UserError, match=r"sequence_parallel_size 4 .* heads of keys and values"):
        resolve(llama, sequence=4)
    with pytest.raises(UserError, match="eager cannot"):
        resolve(llama, sequence=2, attention="eager")


FALCON = FalconConfig(vocab_size=320, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
BUCKETED = {
    "MambaForCausalLM takes no position_ids": MambaConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=4
    ),
    "FalconForCausalLM computes its attention itself": FALCON,
    "Gemma2ForCausalLM has attention with soft caps": Gemma2Config(**SIZES, **MIXED),
    "Phi3ForCausalLM encodes positions by the longest": Phi3Config(
        **SIZES, rope_parameters=LONGROPE, original_max_position_embeddings=64
    ),
    "DogeForCausalLM has attention with soft caps, sinks, biases or a mask of its own": DogeConfig(
        **SIZES
    ),
    "RobertaForCausalLM counts positions from the padding token": RobertaConfig(
        **SIZES, is_decoder=True
    ),
}  # fmt: skip


@pytest.mark.parametrize("problem", BUCKETED)
def test_an_architecture_that_cannot_be_packed_is_bucketed_or_refused_by_name(problem, resolve):
    batching, attention, why = resolve(BUCKETED[problem])
    assert (batching, attention) == ("bucketed", None) and why.startswith(problem)
    with pytest.raises(UserError, match=problem):
        resolve(BUCKETED[problem], batching="packed")


def test_a_model_whose_packed_examples_differ_is_refused():
    """Falcon's masks ignore positions."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(FALCON)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    with pytest.raises(UserError, match="packed examples of FalconForCausalLM differ from"):
        check_packing(model.train(), range(64))
    assert model.training
