"""The loss equals a plain loss on several architectures.    pytest tests/test_loss.py"""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, Gemma2Config, GPT2Config, LlamaConfig, Qwen3Config

from data.loader import MicroBatch
from model.loss import SupervisedLoss

torch.set_num_threads(1)  # for models this small, threads cost more than they save

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}  # fmt: skip
ARCHITECTURES = {
    "llama": LlamaConfig(**SIZES),
    "llama, tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES),
    "gemma2, soft-capped logits": Gemma2Config(**SIZES, final_logit_softcapping=5.0),
    "gpt2": GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64,
                       attn_pdrop=0, embd_pdrop=0, resid_pdrop=0),
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


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_sum_and_gradients_equal_the_plain_loss(name):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(ARCHITECTURES[name]).double()
    batch, labels = micro_batch()

    logits = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits
    plain = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
    plain.backward()
    expected = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()

    loss = SupervisedLoss(model)
    ours = loss(model, batch).cross_entropy
    ours.backward()
    assert ours.item() == pytest.approx(plain.item(), rel=1e-6)  # ours is summed in float32
    for n, p in model.named_parameters():
        torch.testing.assert_close(p.grad, expected[n], rtol=1e-5, atol=1e-6, msg=n)
    whole = model(input_ids=batch.input_ids).logits
    assert whole.shape == (3, 17, 64), "the hook must leave other forward passes alone"


def test_a_micro_batch_without_targets_gives_zero_loss_and_zero_gradients():
    model = AutoModelForCausalLM.from_config(ARCHITECTURES["llama, tied"])
    ids = np.zeros((1, 1), np.int64)
    filler = MicroBatch.of(ids, np.zeros((1, 1), bool), attention_mask=np.ones_like(ids))
    value = SupervisedLoss(model)(model, filler).cross_entropy
    value.backward()
    assert value.item() == 0
    assert all(p.grad is None or (p.grad == 0).all() for p in model.parameters())


def test_the_head_computes_only_supervised_positions():
    model = AutoModelForCausalLM.from_config(ARCHITECTURES["llama"])
    rows = []
    loss = SupervisedLoss(model)
    model.lm_head.register_forward_hook(lambda _m, args, _out: rows.append(args[0].shape[:-1]))
    batch, labels = micro_batch()
    loss(model, batch)
    assert rows == [(1, int((labels != -100).sum()))]
