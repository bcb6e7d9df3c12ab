"""Packed examples equal the same examples alone.    pytest tests/model/test_packing.py"""

import copy
import inspect
import math
import re
import sys
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from harness.batches import micro_batch
from harness.inputs import SMALL_SIZES, read_config
from torch._dynamo.utils import counters
from torch.nn.attention import restore_flash_attention_impl
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    DogeConfig,
    FalconConfig,
    Gemma2Config,
    Gemma4TextConfig,
    GPTBigCodeConfig,
    GraniteMoeHybridConfig,
    Lfm2Config,
    LlamaConfig,
    Phi3Config,
    PhimoeConfig,
    Qwen2Config,
    Qwen3_5TextConfig,
    RobertaConfig,
)

from zerotrain.config.schema import ModelConfig
from zerotrain.data.loader import MicroBatch, collate
from zerotrain.data.plan import Budget
from zerotrain.model import packing
from zerotrain.model.architecture import meta_model
from zerotrain.model.mixers import keep_apart
from zerotrain.model.packing import PACKED_EXAMPLES, attend_within, resolve_batching
from zerotrain.model.probes import check_packing, layers_with_kernel
from zerotrain.runtime.errors import UserError
from zerotrain.runtime.machine import Machine
from zerotrain.training.engine import change_blocks
from zerotrain.training.loss import SupervisedLoss

torch.set_num_threads(1)  # for models this small, threads cost more than they save

SIZES = {**SMALL_SIZES, "head_dim": 8, "max_position_embeddings": 256, "pad_token_id": 0}
MIXED = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
LLAMA = LlamaConfig(**SIZES)
FAMILIES = {
    "llama, grouped heads": LLAMA,
    "qwen2, sliding window": Qwen2Config(**SIZES, **MIXED, use_sliding_window=True),
    "deepseek_v3, two head sizes": DeepseekV3Config(
        **{**SIZES, "num_key_value_heads": 4}, kv_lora_rank=8, q_lora_rank=8, qk_nope_head_dim=8,
        qk_rope_head_dim=8, v_head_dim=8, first_k_dense_replace=2,
    ),
    "phimoe, sliding window that only the mask has": PhimoeConfig(
        **SIZES, num_local_experts=4, num_experts_per_tok=2, sliding_window=5
    ),
    "gpt_bigcode, positions that only the mask has": GPTBigCodeConfig(
        vocab_size=320, n_embd=32, n_layer=2, n_head=4, n_positions=256, attn_pdrop=0, embd_pdrop=0,
        resid_pdrop=0,
    ),
    "qwen3_5_text, gated delta nets": Qwen3_5TextConfig(
        **SIZES, layer_types=["linear_attention", "full_attention"], linear_num_key_heads=2,
        linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8,
    ),
    "granitemoehybrid, mamba-2": GraniteMoeHybridConfig(
        **SIZES, layer_types=["mamba", "attention"], mamba_n_heads=4, mamba_d_head=16,
        mamba_n_groups=1, shared_intermediate_size=48, num_local_experts=0,
    ),
    "lfm2, convolutions": Lfm2Config(**SIZES, layer_types=["conv", "full_attention"]),
}  # fmt: skip


def make(architecture, attention=None):
    """A model whose random weights make its attention far from uniform."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        copy.deepcopy(architecture), attn_implementation=attention
    )
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return model


@pytest.mark.parametrize(
    "name, checkpointing, compiled",
    [
        *product(FAMILIES, [False, True], [False]),
        ("llama, grouped heads", True, True),
        ("lfm2, convolutions", True, True),
    ],
)
def test_packed_examples_equal_each_alone(name, checkpointing, compiled):
    """Compare logits and gradients in fp32, with windows shorter than the examples."""
    own = make(FAMILIES[name])
    ours = make(FAMILIES[name], PACKED_EXAMPLES)
    keep_apart(ours)
    lengths = [12, 7, 1, 15]
    ids = torch.randint(3, 320, (1, sum(lengths)), generator=torch.Generator().manual_seed(1))
    position_ids = torch.cat([torch.arange(n) for n in lengths])[None]
    options = ModelConfig("x", activation_checkpointing=checkpointing, compile=compiled)
    change_blocks(ours, options, 0)
    counters.clear()
    ours.train()
    batch = MicroBatch.of(ids.numpy(), ids.numpy() < 0, position_ids=position_ids.numpy())
    eager = torch.compiler.set_stance("default", force_backend="eager")  # graphs as they are
    with attend_within(batch) as inputs, eager:
        packed = ours(input_ids=ids, use_cache=False, **inputs).logits
    alone = [own(input_ids=part, use_cache=False).logits for part in ids.split(lengths, 1)]
    alone = torch.cat(alone, 1)
    weights = torch.randn(packed.shape, generator=torch.Generator().manual_seed(2))
    with eager:
        for logits in (packed, alone):
            (logits * weights).sum().backward()
    # A layer has a graph before its attention or mixer and one after it.
    assert counters["stats"]["unique_graphs"] >= (4 if compiled else 0)
    assert (packed - alone).abs().max() < 1e-6 * alone.abs().max()
    pairs = zip(own.parameters(), ours.parameters(), strict=True)
    gradients = [(p.grad, other.grad) for p, other in pairs if p.grad is not None]
    largest = max(gradient.abs().max() for gradient, _ in gradients)
    assert all((one - other).abs().max() < 1e-6 * largest for one, other in gradients)


NO_ROWS = SimpleNamespace(fetch=lambda _: [], supervised=np.zeros(0, int))


@pytest.mark.parametrize("packed", [True, False])
def test_a_filler_has_no_graph_and_no_weight_of_its_own(packed):
    """A rank without examples would compile while the others wait for it."""
    model = make(LLAMA, PACKED_EXAMPLES if packed else None)
    change_blocks(model, ModelConfig("x", compile=True), 0)
    loss = SupervisedLoss(model)
    counters.clear()
    with torch.compiler.set_stance("default", force_backend="eager"):
        for lengths in ((40, 7, 90), (9, 12), (5, 60, 5, 4, 5)):
            loss(model, micro_batch(packed, lengths)).cross_entropy.backward()
        graphs = counters["stats"]["unique_graphs"]
        model.zero_grad()
        filler = collate(NO_ROWS, np.zeros(0, int), Budget(2, 300, 1, packed))
        none = loss(model, filler).cross_entropy
        none.backward()
    assert counters["stats"]["unique_graphs"] == graphs > 0
    assert none == 0 and all(p.grad is None or not p.grad.any() for p in model.parameters())
    assert filler.part(1, 2).input_ids.shape[1] == 2, "a slice of it"


# --------------------------------------------------------------------------------------------------
# The kernel of GPUs


def attend(window, device, dtype, size, size_of_values=None):
    """Return the output of attention with two heads per key, and the gradients of its inputs."""
    lengths = [12, 7, 1, 150]
    generator = torch.Generator().manual_seed(0)
    layer = make(LLAMA, PACKED_EXAMPLES).model.layers[0].self_attn
    shapes = (4, size), (2, size), (2, size_of_values or size)
    states = [
        torch.randn(1, heads, 170, own, generator=generator).to(device, dtype).requires_grad_()
        for heads, own in shapes
    ]
    scale = 1.2 * size**-0.5  # differs from the default, size**-0.5
    ends = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device=device)
    examples = packing.Examples(lengths, ends, None, window)
    output, _ = packing.packed_attention(layer, *states, examples, scaling=scale)
    output.square().sum().backward()
    return [output.detach(), *(state.grad for state in states)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="the varlen kernel needs a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize("sizes", [(16,), (96,), (128,), (256,), (192, 128), (20, 40)])
def test_the_varlen_kernel_equals_attention_per_example(window, dtype, sizes, monkeypatch):
    calls, varlen_attn = [], packing.varlen_attn
    monkeypatch.setattr(
        packing, "varlen_attn", lambda *a, **k: calls.append(a) or varlen_attn(*a, **k)
    )
    found = attend(window, "cuda", dtype, *sizes)
    assert len(calls) == 1
    for one, other in zip(found, attend(window, "cpu", torch.float32, *sizes), strict=True):
        assert (one.cpu().float() - other).norm() < 2e-2 * other.norm()


class Kernel:
    """A stand-in for torch's varlen kernel that computes from its arguments, in fp32."""

    def __init__(self, names="enable_gqa seqused_k block_table num_splits"):
        parameter = inspect.Parameter
        self.calls = 0
        self.__signature__ = inspect.Signature([
            *(parameter(x, parameter.POSITIONAL_ONLY) for x in "qkvabcd"),
            *(parameter(x, parameter.KEYWORD_ONLY, default=None)
              for x in f"return_aux scale window_size {names}".split()),
        ])  # fmt: skip

    def __call__(self, *args, **kwargs):
        bound = self.__signature__.bind(*args, **kwargs).arguments
        self.calls += 1
        *states, ends, ends_of_keys, longest, longest_key = args  # [tokens, heads, size]
        assert ends is ends_of_keys and ends.dtype == torch.int32
        assert len({x.shape[2] for x in states}) == 1 and states[0].shape[2] % 8 == 0
        assert longest == longest_key == ends.diff().max()
        heads, size = states[0].shape[1:]
        query, key, value = (x.repeat_interleave(heads // x.shape[1], 1) for x in states)
        scores = torch.einsum("qhd,khd->hqk", query, key) * (bound.get("scale") or size**-0.5)
        number = torch.arange(len(query))
        example, apart = torch.bucketize(number, ends[1:], right=True), number[:, None] - number
        before, after = (x if x >= 0 else len(query) for x in bound["window_size"])
        is_seen = (apart <= before) & (-apart <= after) & (example[:, None] == example)
        return torch.einsum("hqk,khd->qhd", scores.where(is_seen, -math.inf).softmax(-1), value)


@pytest.mark.parametrize("names", ["", "enable_gqa seqused_k block_table num_splits"])
@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize("sizes", [(16, 16), (24, 16), (20, 36)])
def test_the_varlen_kernel_gets_scale_window_and_bounds(names, window, sizes, monkeypatch):
    """Keyword parameters of torch 2.11 and of newer versions differ."""
    kernel = Kernel(names)
    expected = attend(window, "cpu", torch.float32, *sizes)
    monkeypatch.setattr(packing, "has_kernel", lambda *_: True)
    monkeypatch.setattr(packing, "varlen_attn", kernel)
    monkeypatch.setattr(packing, "VARLEN_OPTIONS", packing.varlen_options(kernel))
    found = attend(window, "cpu", torch.float32, *sizes)
    assert kernel.calls == 1
    for one, other in zip(found, expected, strict=True):
        assert (one - other).abs().max() < 1e-5 * other.abs().max()


KERNEL_LAYERS = {
    "deepseek_v3, two head sizes": [True, True],
    "qwen2, sliding window": [True, True],
    "gemma4_text, larger heads": [True, False],
    "llama, dropout": [False, False],
}


@pytest.mark.parametrize("name", KERNEL_LAYERS)
def test_layers_without_the_kernel_are_counted(name, monkeypatch):
    """Gemma 4's global layers have larger heads. Dropout is in no kernel."""
    families = FAMILIES | {
        "gemma4_text, larger heads": Gemma4TextConfig(
            **SIZES, **MIXED, global_head_dim=264, vocab_size_per_layer_input=320,
            hidden_size_per_layer_input=8, num_kv_shared_layers=0,
        ),
        "llama, dropout": LlamaConfig(**SIZES, attention_dropout=0.1),
    }  # fmt: skip
    model, has_kernel = make(families[name], PACKED_EXAMPLES).train(), packing.has_kernel

    def as_on_a_gpu(*states):
        parts = (SimpleNamespace(is_cuda=True, dtype=torch.bfloat16, shape=s.shape) for s in states)
        return has_kernel(*parts)

    monkeypatch.setattr(packing, "has_kernel", as_on_a_gpu)
    monkeypatch.setattr(packing, "varlen_attn", Kernel())
    state = torch.get_rng_state()
    layers = layers_with_kernel(model, range(3, 320))
    assert layers == KERNEL_LAYERS[name] and torch.get_rng_state().equal(state)
    line = packing.kernel_line(layers)
    assert line == "FA2" if all(layers) else f"{sum(layers)} of 2 layers" in line


@pytest.mark.parametrize("capability, package, kernel", [
    (8, "flash_attn_interface", "FA2"), (9, "", "FA2"), (9, "flash_attn_interface", "FA3"),
    (10, "flash_attn.cute.interface", "FA4"),
])  # fmt: skip
def test_a_newer_kernel_needs_its_gpu_and_package(capability, package, kernel, monkeypatch):
    """The package is a stand-in, which torch's own function accepts."""
    stub = SimpleNamespace(_flash_attn_fwd=None, _flash_attn_bwd=None)
    operators = torch.library.Library("flash_attn_3", "FRAGMENT")
    for name in ("fwd", "bwd"):
        operators.define(f"{name}(Tensor q) -> Tensor")
    monkeypatch.setitem(sys.modules, package or "unused", stub)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (capability, 0))
    packing.activate_kernel()
    assert packing.kernel_line([True]) == kernel
    restore_flash_attention_impl(False)


# --------------------------------------------------------------------------------------------------
# Which models are packed


@pytest.fixture
def resolve(tiny_config):
    def resolve(architecture, machine=CPU, sequence=1, **options):
        """Return batching, attention implementation and reason."""
        config = read_config(tiny_config(**{"train__precision": "fp32", **options}))
        skeleton = meta_model(copy.deepcopy(architecture), False)
        resolved, why = resolve_batching(config, skeleton, machine, sequence)
        return resolved.data.batching, resolved.model.attn_implementation, why

    return resolve


CPU, GPU, OLD_GPU = Machine(1, 1), Machine(1, 1, "cuda"), Machine(1, 1, "cuda", has_varlen=False)
BF16 = {"train__precision": "bf16"}
PACKED = ("packed", PACKED_EXAMPLES)


def test_auto_packs_where_no_score_between_examples_is_computed(resolve):
    for architecture in FAMILIES.values():
        assert resolve(architecture)[:2] == PACKED
    assert resolve(LLAMA, GPU, **BF16)[:2] == PACKED
    for machine, precision in ((GPU, "fp32"), (OLD_GPU, "fp16")):
        batching, attention, why = resolve(LLAMA, machine, train__precision=precision)
        assert (batching, attention) == ("bucketed", None) and why.startswith("varlen attention")


def test_the_attention_of_the_config_stays(resolve):
    eager = {"model__attn_implementation": "eager"}
    assert resolve(LLAMA, **eager)[:2] == ("bucketed", "eager")
    with pytest.raises(UserError, match="use bucketed"):
        resolve(LLAMA, data__batching="packed", **eager)
    assert resolve(LLAMA, data__batching="bucketed", **eager)[:2] == ("bucketed", "eager")
    with pytest.raises(UserError, match=r"sequence_parallel_size 2 .* eager; remove it"):
        resolve(LLAMA, sequence=2, **eager)


def test_sequences_that_cannot_be_shared_are_refused(resolve):
    bucketed = resolve(LLAMA, sequence=2, data__batching="bucketed")
    assert bucketed[:2] == ("bucketed", PACKED_EXAMPLES)
    with pytest.raises(UserError, match=r"sequence_parallel_size 4 .* heads of keys and values"):
        resolve(LLAMA, sequence=4)
    with pytest.raises(UserError, match=r"sequence_parallel_size 2 .* whole sequences"):
        resolve(FAMILIES["lfm2, convolutions"], sequence=2)


FALCON = FalconConfig(vocab_size=320, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
BUCKETED = {
    ".* type falcon": FALCON,
    ".* type gemma2": Gemma2Config(**SIZES, **MIXED),
    "phi3 encodes positions by the longest": Phi3Config(
        **SIZES, rope_parameters=LONGROPE, original_max_position_embeddings=64
    ),
}


@pytest.mark.parametrize("problem", BUCKETED)
def test_an_architecture_that_cannot_be_packed_is_bucketed_or_refused(problem, resolve):
    batching, attention, why = resolve(BUCKETED[problem])
    assert (batching, attention) == ("bucketed", None) and re.match(problem, why)
    with pytest.raises(UserError, match=f"{problem}.*; use bucketed"):
        resolve(BUCKETED[problem], data__batching="packed")
    resolve(BUCKETED[problem], data__batching="bucketed")


NOT_REPORTED = {
    "falcon": FALCON,  # its masks ignore positions
    "doge": DogeConfig(**SIZES),  # it computes with its mask
    "roberta": RobertaConfig(**SIZES, is_decoder=True),  # its positions start at padding_idx
}


@pytest.mark.parametrize("kind", NOT_REPORTED)
def test_a_model_whose_packed_examples_differ_is_refused(kind, resolve):
    model = make(NOT_REPORTED[kind], PACKED_EXAMPLES if kind != "falcon" else None).train()
    with pytest.raises(UserError, match=f"{type(model).__name__} .*bucketed"):
        check_packing(model, range(64))
    assert model.training
    bucketed = resolve(NOT_REPORTED[kind], data__batching="bucketed")
    assert bucketed[:2] == ("bucketed", None)  # and packed examples are not checked
