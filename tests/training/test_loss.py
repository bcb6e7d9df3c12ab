"""The loss equals a plain loss on several architectures.    pytest tests/training/test_loss.py"""

import sys

import numpy as np
import pytest
import torch
import yaml
from harness.batches import micro_batch
from harness.inputs import SMALL_SIZES as SIZES
from harness.processes import run
from harness.repository import REPO
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    ProphetNetConfig,
)

from zerotrain.data.loader import MicroBatch
from zerotrain.runtime.errors import UserError
from zerotrain.training.loss import CHUNK_TOKENS, SupervisedLoss

torch.set_num_threads(1)  # for models this small, threads cost more than they save

ARCHITECTURES = yaml.safe_load("""
llama: {model_type: llama}
llama, tied: {model_type: llama, tie_word_embeddings: true}
gemma3, soft-capped logits: {model_type: gemma3_text, head_dim: 8, final_logit_softcapping: 5.0}
cohere, scaled logits: {model_type: cohere, logit_scale: 0.25, bos_token_id: 1, eos_token_id: 2}
granite, divided logits: {model_type: granite, logits_scaling: 4.0}
nanochat, soft caps of a float: {model_type: nanochat, final_logit_softcapping: 5.0}
falcon_h1, multiplied logits:
  model_type: falcon_h1
  lm_head_multiplier: 0.5
  mamba_d_ssm: 64
  mamba_n_heads: 4
  mamba_d_state: 8
  mamba_d_head: 16
phi, a head with bias: {model_type: phi, embd_pdrop: 0, resid_pdrop: 0}
""")


def plain_loss(model, batch):
    logits = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits
    logits = logits.flatten(0, 1)[batch.positions]
    return nn.functional.cross_entropy(logits, batch.targets, reduction="sum")


@pytest.mark.parametrize("chunk_tokens", [256, 16])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_sum_and_gradients_equal_the_plain_loss(name, chunk_tokens, monkeypatch):
    monkeypatch.setitem(CHUNK_TOKENS, "cpu", chunk_tokens)
    torch.manual_seed(0)
    config = AutoConfig.for_model(**SIZES | ARCHITECTURES[name])
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():  # large logits, which soft caps change
        nn.init.normal_(parameter, std=0.2)
    batch = micro_batch(packed=False)
    plain = plain_loss(model, batch)
    plain.backward()
    expected = {n: p.grad for n, p in model.named_parameters()}
    model.zero_grad()

    loss = SupervisedLoss(model)
    assert loss.check(model) is None
    ours, router = loss(model, batch)
    ours.backward()
    assert router == 0
    assert ours.item() == pytest.approx(plain.item(), rel=1e-6)
    largest = max(g.norm() for g in expected.values())
    for n, p in model.named_parameters():
        difference = (p.grad - expected[n]).norm()
        assert difference < 1e-6 * max(expected[n].norm(), 1e-2 * largest), n
    monkeypatch.delattr(torch.autograd, "grad")  # an evaluation computes no gradients
    with torch.no_grad():
        assert loss(model, batch).cross_entropy.item() == pytest.approx(plain.item(), rel=1e-6)
    whole = model(input_ids=batch.input_ids).logits
    assert whole.shape[:2] == batch.input_ids.shape  # other forward passes stay as they are


class LikeAGpu(TorchDispatchMode):
    """Multiplies 16-bit tensors by numbers on the device as a GPU does: it rounds the numbers."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function in (torch.ops.aten.mul.Tensor, torch.ops.aten.mul_.Tensor):
            number = args[1]
            if args[0].itemsize == 2 and isinstance(number, torch.Tensor) and number.dim() == 0:
                args = args[0], number.to(args[0].dtype)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_in_16_bits_are_summed_and_scaled_in_fp32(dtype, monkeypatch):
    """They are rounded once."""
    monkeypatch.setitem(CHUNK_TOKENS, "cpu", 2)
    torch.manual_seed(0)
    model, batch = LlamaForCausalLM(LlamaConfig(**SIZES)).to(dtype), micro_batch(packed=False)
    states = []
    model.model.norm.register_forward_hook(lambda _, args, out: states.append(out))
    with LikeAGpu():
        loss = SupervisedLoss(model)(model, batch).cross_entropy
        states[0].retain_grad()
        (loss / 3).backward()
    weight = model.lm_head.weight
    of_weight, of_states = torch.zeros_like(weight, dtype=torch.float64), []
    hidden = states[0].detach().flatten(0, 1)[batch.positions].requires_grad_()
    for part, targets in zip(hidden.split(2), batch.targets.split(2), strict=True):
        each = nn.functional.cross_entropy((part @ weight.T).float(), targets, reduction="sum")
        of_part, other = torch.autograd.grad(each, (part, weight))
        of_states.append(of_part.double() / 3)
        of_weight += other.double() / 3
    found = states[0].grad.flatten(0, 1)[batch.positions]
    for ours, exact in ((weight.grad, of_weight), (found, torch.cat(of_states))):
        limit = torch.finfo(dtype).eps * exact.abs() / 2 + 1e-6 * exact.abs().max()
        assert (ours.double() - exact).abs().sub(1.01 * limit).max() <= 0


BY_TRITON = """
import os, sys, types
os.environ["TRITON_INTERPRET"] = "1"  # on CPU; read when the kernels are imported
from triton.backends import backends
backends["nvidia"].driver.is_active = lambda: True  # or DeepSpeed defines no kernels

import torch
import torch.nn.functional as F
from deepspeed.runtime import chunked_cross_entropy as kernels
from harness.batches import micro_batch
from transformers import LlamaConfig, LlamaForCausalLM
from zerotrain.model.packing import PACKED_EXAMPLES
from zerotrain.training import loss as ours

def in_fp32(logits, targets, **options):
    return F.cross_entropy(logits.float(), targets, **options)

def compare(loss_of, dtype, *leaves):
    (loss, gradients), (exact, exact_gradients) = [
        (loss.detach(), torch.cat([g.float().flatten() for g in torch.autograd.grad(loss, leaves)]))
        for loss in map(loss_of, (kernels.chunked_cross_entropy, in_fp32))
    ]
    # The interpreter does not round to bf16, it truncates.
    limit = 1e-6 if dtype == torch.float32 else 2e-2
    error = (gradients - exact_gradients).norm() / exact_gradients.norm()
    assert (loss / exact - 1).abs() < 1e-6 and error < limit, (dtype, loss / exact - 1, error)

def of_model(function):
    supervised._sum_cross_entropy = lambda x, targets, *_: function(x, targets, reduction="sum")
    return supervised(model, micro_batch(packed=True)).cross_entropy

kernels._resolve_backend = lambda *_: "triton"
ours.CHUNK_TOKENS["cpu"] = 48  # The last chunk is smaller.
words = 5000  # more than the 4,096 of a kernel's block
torch.manual_seed(0)
config = LlamaConfig(**eval(sys.argv[1]) | {"vocab_size": words, "initializer_range": 0.2})
model = LlamaForCausalLM._from_config(config, attn_implementation=PACKED_EXAMPLES)
for dtype in (torch.float32, torch.bfloat16):
    supervised = ours.SupervisedLoss(model.to(dtype))
    compare(of_model, dtype, *model.parameters())
targets = torch.tensor([0, -100, words - 1, -100, 4096])
logits = torch.linspace(0, 99, 5 * words).sin().view(5, words).requires_grad_()
compare(lambda f: f(logits, targets, reduction="sum"), torch.float32, logits)
print("ALL WELL")
"""


def test_the_triton_kernels_give_the_loss_of_torch():
    pytest.importorskip("triton", minversion="3.7")  # The interpreter of 3.6 fails with numpy 2.4.
    done = run([sys.executable, "-c", BY_TRITON, SIZES], cwd=REPO / "tests")
    assert "ALL WELL" in done.output, done.output


@pytest.mark.parametrize("weight", [1.0, 30.0])
def test_the_heads_gradient_does_not_overflow_in_fp16(weight):
    """A final norm of 200 and one frequent target: the sum over a chunk is above 65,504."""
    config = LlamaConfig(**SIZES, max_position_embeddings=2048)
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    nn.init.constant_(model.model.norm.weight, 200.0)
    nn.init.normal_(model.lm_head.weight, std=1e-3)
    ids = np.random.default_rng(0).integers(3, 64, (1, 1500))
    ids[:, ::20] = 7
    ids[:, 1::3] = 5
    batch = MicroBatch.of(ids, np.arange(1500)[None] > 0, attention_mask=np.ones_like(ids))
    of_targets = [np.zeros(1499), np.full(1499, weight)] if weight != 1 else [np.zeros(1499)]
    batch = batch.about_targets(np.stack(of_targets).astype(np.float32))
    gradients = []
    for dtype in (torch.float16, torch.float32):  # The same numbers, since fp16 comes first.
        model.to(dtype).zero_grad()
        loss = SupervisedLoss(model)(model, batch).cross_entropy
        (loss / (64 * weight)).backward()
        gradients.append({name: p.grad.float() for name, p in model.named_parameters()})
    half, exact = gradients
    for name, gradient in exact.items():
        assert (half[name] - gradient).norm() < 0.02 * gradient.norm(), name


def test_filler_has_no_router_loss():
    config = MixtralConfig(**SIZES, num_local_experts=6, output_router_logits=True)
    model = AutoModelForCausalLM.from_config(config)
    ids = np.ones((1, 8), int)
    assert SupervisedLoss(model)(model, MicroBatch.of(ids, ids < 0)).router.item() == 0


class LargestTensor(TorchDispatchMode):
    """Records the size of the largest tensor that is made while it is active."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        sizes = [t.numel() for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
        self.elements = max([self.elements, *sizes])
        return result


def test_no_tensor_has_full_logits(monkeypatch):
    """The full logits would be 400 targets x 512 words."""
    config = LlamaConfig(**{**SIZES, "vocab_size": 512}, max_position_embeddings=512)
    ids = np.random.default_rng(0).integers(3, 64, (1, 401))
    is_target = np.arange(401)[None] > 0
    batch = MicroBatch.of(ids, is_target, attention_mask=np.ones_like(ids))
    largest = {}
    for chunk_tokens in (400, 20):
        model = LlamaForCausalLM(config)
        monkeypatch.setitem(CHUNK_TOKENS, "cpu", chunk_tokens)
        loss = SupervisedLoss(model)
        with LargestTensor() as largest[chunk_tokens]:
            loss(model, batch).cross_entropy.backward()
    assert largest[400].elements == 400 * 512 > 10 * largest[20].elements


class OverPositions(LlamaForCausalLM):
    """A model whose logits depend on the logits of other positions."""

    def forward(self, **inputs):
        out = super().forward(**inputs)
        out["logits"] = out.logits - out.logits.mean(1, keepdim=True)
        return out


def test_a_model_with_an_unknown_logit_function_gets_full_logits():
    model = OverPositions(LlamaConfig(**SIZES))
    loss = SupervisedLoss(model)
    assert "OverPositions" in loss.check(model)
    batch = micro_batch(packed=False)
    expected = plain_loss(model, batch).item()
    assert loss(model, batch).cross_entropy.item() == pytest.approx(expected, rel=1e-6)


def test_a_head_that_gets_other_states_than_the_tokens_is_refused_by_name():
    """ProphetNet's gets two states of each token."""
    sizes = {"hidden_size": 32, "num_decoder_layers": 1, "decoder_ffn_dim": 32}
    config = ProphetNetConfig(
        vocab_size=320, **sizes, num_decoder_attention_heads=4, is_encoder_decoder=False
    )
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(UserError, match="ProphetNet"):
        SupervisedLoss(model).check(model)
