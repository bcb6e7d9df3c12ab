"""The loss equals a plain loss on several architectures.    pytest tests/test_loss.py"""

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import strategy
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    FalconH1Config,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    LlamaForCausalLM,
    NanoChatConfig,
    PhiConfig,
    Qwen3Config,
)

from data.loader import MicroBatch
from model.loss import SupervisedLoss

torch.set_num_threads(1)  # for models this small, threads cost more than they save

CPU = torch.device("cpu")
SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip
HEADS = {"head_dim": 8}
ARCHITECTURES = {
    "llama": LlamaConfig(**SIZES),
    "llama, tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES, **HEADS),
    "gemma2, soft-capped logits": Gemma2Config(**SIZES, **HEADS, final_logit_softcapping=5.0),
    "gemma3, soft-capped logits": Gemma3TextConfig(**SIZES, **HEADS, final_logit_softcapping=5.0),
    "cohere, scaled logits": CohereConfig(**SIZES, logit_scale=0.25, bos_token_id=1,
                                          eos_token_id=2),
    "granite, divided logits": GraniteConfig(**SIZES, logits_scaling=4.0),
    "nanochat, soft caps of a float": NanoChatConfig(**SIZES, final_logit_softcapping=5.0),
    "falcon_h1, multiplied logits": FalconH1Config(**SIZES, lm_head_multiplier=0.5, mamba_d_ssm=64,
                                                   mamba_n_heads=4, mamba_d_state=8,
                                                   mamba_d_head=16),
    "phi, a head with bias": PhiConfig(**SIZES, embd_pdrop=0, resid_pdrop=0),
    "gpt2": GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64, attn_pdrop=0,
                       embd_pdrop=0, resid_pdrop=0, bos_token_id=1, eos_token_id=2),
}  # fmt: skip


def micro_batch():
    """Three examples of 17, 9 and 3 tokens, half of them targets; and plain labels for them."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 64, (3, 17), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, 9:] = 0
    mask[2, 3:] = 0
    is_target = (torch.rand(ids.shape, generator=generator) < 0.5) & (mask == 1)
    is_target[:, 0] = False
    batch = MicroBatch.of(ids.numpy(), is_target.numpy(), attention_mask=mask.numpy())
    return batch, torch.where(is_target, ids, -100)


def plain_loss(model, batch, labels):
    logits = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")


def in_chunks(model, chunk_tokens):
    loss = SupervisedLoss(model)
    problem = loss.use_chunks(model, range(3, 64), CPU, chunk_tokens)
    return loss, problem


@pytest.mark.parametrize("chunk_tokens", [0, 4, 1000])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_sum_and_gradients_equal_the_plain_loss(name, chunk_tokens):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(ARCHITECTURES[name])
    for parameter in model.parameters():  # logits where soft caps matter
        nn.init.normal_(parameter, std=0.2)
    batch, labels = micro_batch()
    plain = plain_loss(model, batch, labels)
    plain.backward()
    expected = {n: p.grad for n, p in model.named_parameters()}
    model.zero_grad()

    loss, problem = in_chunks(model, chunk_tokens) if chunk_tokens else (SupervisedLoss(model), 0)
    assert not problem
    ours, router = loss(model, batch)
    ours.backward()
    assert router is None
    assert ours.item() == pytest.approx(plain.item(), rel=1e-6)
    largest = max(g.norm() for g in expected.values())
    for n, p in model.named_parameters():
        difference = (p.grad - expected[n]).norm()
        assert difference < 1e-6 * max(expected[n].norm(), 1e-2 * largest), n
    with torch.no_grad():
        assert loss(model, batch).cross_entropy.item() == pytest.approx(plain.item(), rel=1e-6)
    whole = model(input_ids=batch.input_ids).logits
    assert whole.shape == (3, 17, 64), "other forward passes stay as they are"


@pytest.mark.parametrize("chunk_tokens", [0, 4])
def test_a_micro_batch_without_targets_gives_zero_loss_and_zero_gradients(chunk_tokens):
    model = AutoModelForCausalLM.from_config(ARCHITECTURES["llama, tied"])
    ids = np.zeros((1, 1), np.int64)
    filler = MicroBatch.of(ids, np.zeros((1, 1), bool), attention_mask=np.ones_like(ids))
    loss = in_chunks(model, chunk_tokens)[0] if chunk_tokens else SupervisedLoss(model)
    value = loss(model, filler).cross_entropy
    value.backward()
    assert value.item() == 0
    assert all(p.grad is not None and (p.grad == 0).all() for p in model.parameters())


class LargestTensor(TorchDispatchMode):
    """Most elements of a tensor that exists while it is active."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        sizes = [t.numel() for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
        self.elements = max([self.elements, *sizes])
        return result


def test_no_tensor_has_whole_logits():
    """400 targets x 512 words."""
    config = LlamaConfig(**{**SIZES, "vocab_size": 512}, max_position_embeddings=512)
    ids = np.random.default_rng(0).integers(3, 64, (1, 401))
    is_target = np.arange(401)[None] > 0
    batch = MicroBatch.of(ids, is_target, attention_mask=np.ones_like(ids))
    largest = {}
    for chunk_tokens in (0, 20):
        model = LlamaForCausalLM(config)
        loss = in_chunks(model, chunk_tokens)[0] if chunk_tokens else SupervisedLoss(model)
        with LargestTensor() as largest[chunk_tokens]:
            loss(model, batch).cross_entropy.backward()
    assert largest[0].elements == 400 * 512 > 10 * largest[20].elements


class OverPositions(LlamaForCausalLM):
    """Logits that depend on those of other positions."""

    def forward(self, **inputs):
        out = super().forward(**inputs)
        out["logits"] = out.logits - out.logits.mean(1, keepdim=True)
        return out


class Scaled(LlamaForCausalLM):
    """Logits times a trained scale."""

    def __init__(self, config):
        super().__init__(config)
        self.scale = nn.Parameter(torch.tensor(0.3))

    def forward(self, **inputs):
        out = super().forward(**inputs)
        out["logits"] = out.logits * self.scale.exp()
        return out


class OnNumpy(LlamaForCausalLM):
    """Logits that leave torch on their way."""

    def forward(self, **inputs):
        out = super().forward(**inputs)
        out["logits"] = torch.from_numpy(out.logits.detach().numpy() * 2)
        return out


@pytest.mark.parametrize("kind", [OverPositions, Scaled, OnNumpy])
def test_a_model_that_does_something_else_to_its_logits_keeps_whole_logits(kind):
    model = kind(ARCHITECTURES["llama"])
    loss, problem = in_chunks(model, 4)
    assert problem == "it does more to its logits than functions of each of them alone"
    if kind is Scaled:
        batch, labels = micro_batch()
        value, plain = loss(model, batch).cross_entropy, plain_loss(model, batch, labels)
        assert value.item() == pytest.approx(plain.item(), rel=1e-6)


def test_gradients_of_the_head_are_summed_in_fp32():
    """In bf16, over 50 chunks: no further from the exact ones than from whole logits."""
    torch.manual_seed(0)
    config = LlamaConfig(**{**SIZES, "max_position_embeddings": 2048})
    exact = LlamaForCausalLM(config).bfloat16()
    ids = np.random.default_rng(0).integers(1, 64, (1, 1001))
    is_target = np.arange(1001)[None] > 0
    batch = MicroBatch.of(ids, is_target, attention_mask=np.ones_like(ids))
    gradients = []
    for kind in ("exact", "whole", "chunked"):
        model = LlamaForCausalLM(config).bfloat16()
        model.load_state_dict(exact.state_dict())
        model = model.float() if kind == "exact" else model
        loss = in_chunks(model, 20)[0] if kind == "chunked" else SupervisedLoss(model)
        (loss(model, batch).cross_entropy / 1000).backward()
        gradients.append(model.lm_head.weight.grad.float())
    errors = [(g - gradients[0]).norm() / gradients[0].norm() for g in gradients[1:]]
    assert errors[1] < 1.05 * errors[0], errors


RUNS = {
    "stage 1, soft caps, tied": (1, "bucketed", Gemma2Config(final_logit_softcapping=3.0), False),
    "stage 3, tied": (3, "bucketed", LlamaConfig(tie_word_embeddings=True), False),
    "stage 3, divided, LoRA on the head": (3, "packed", GraniteConfig(logits_scaling=3.0), True),
}


@pytest.mark.launch
@pytest.mark.parametrize("name", RUNS)
def test_both_losses_are_equal_under_zero(forks, tiny_config, tmp_path, sample_tokenizer, name):
    """Loss, every gradient and evaluation, with a filler on one rank; and under ZeRO 3 the head is
    gathered once in a forward pass, not once per chunk.
    """
    stage, batching, architecture, lora = RUNS[name]
    folder = tmp_path / "model"
    changes = {"vocab_size": 320, "initializer_range": 0.1, "max_position_embeddings": 512}
    architecture.update({**SIZES, **HEADS, **changes, "bos_token_id": None, "eos_token_id": 1})
    if hasattr(architecture, "layer_types"):
        architecture.layer_types = architecture.layer_types[:2]
    architecture.pad_token_id = 0
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(architecture).save_pretrained(folder)
    sample_tokenizer.save_pretrained(folder)
    file = strategy(tmp_path, f"zero{stage}")
    ds_config = json.loads(file.read_text())
    if stage == 3:  # so that each use is one gather
        at_once = {
            "stage3_prefetch_bucket_size": 0,
            "stage3_max_reuse_distance": 0,
            "stage3_param_persistence_threshold": 0,
        }
        file.write_text(json.dumps({**ds_config, "zero_optimization": {"stage": 3, **at_once}}))
    config = tiny_config(
        model=folder, ds_config=str(file), data__batching=batching,
        data__micro_batch_tokens=400, model__loss_chunk_tokens=20,
    )  # fmt: skip
    environment = {"LORA": "1"} if lora else {}
    finished = forks.train(config, ranks=2, module="both_losses", **environment)
    assert finished.code == 0, finished.output
    found = json.loads((tmp_path / "run" / "found.json").read_text())
    assert found["loss"] < 1e-6
    gradients = {n: d for n, d in found["gradients"].items() if d is not None}
    assert max(gradients.values()) < 1e-6, gradients
    assert any("lora" in n for n in gradients) == lora and len(gradients) > 10
    assert found["chunked"] == found["whole"]
    if stage == 3:
        uses = 2 if architecture.tie_word_embeddings else 1
        assert found["chunked"]["forward"] == uses * found["micro_batches"] > 1
