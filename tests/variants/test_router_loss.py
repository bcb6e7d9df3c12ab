"""Mixtures of experts: router loss, and micro-batches without tokens for an expert.
pytest tests/variants/test_router_loss.py
"""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from harness.batches import balance
from harness.inputs import SMALL_SIZES, read_config, strategy
from harness.runs import export, read_metrics
from transformers import AutoModelForCausalLM, GptOssConfig, MixtralConfig, Qwen3MoeConfig

from zerotrain.tools.open_plans import open_plans

pytestmark = pytest.mark.launch

SIZES = {**SMALL_SIZES, "max_position_embeddings": 512, "num_experts_per_tok": 2,
         "initializer_range": 0.2, "output_router_logits": True,
         "router_aux_loss_coef": 0.3}  # fmt: skip
EXPERTS = 12
MODELS = {
    "mixtral": MixtralConfig(**SIZES, num_local_experts=EXPERTS),
    "qwen3_moe": Qwen3MoeConfig(**SIZES, moe_intermediate_size=24, num_experts=EXPERTS, head_dim=8),
    "gpt_oss": GptOssConfig(**SIZES, num_local_experts=EXPERTS, head_dim=8, sliding_window=16),
}


def save_model(folder, name, tokenizer):
    torch.manual_seed(0)
    MODELS[name].eos_token_id = tokenizer.eos_token_id
    AutoModelForCausalLM.from_config(MODELS[name]).save_pretrained(folder, max_shard_size="20KB")
    tokenizer.save_pretrained(folder)
    return folder


def train_plainly(config_file, ranks):
    """Train one example at a time, without padding, with a router loss for each micro-batch.

    Returns:
        The metrics of each step by name, and the model.
    """
    config = read_config(config_file)
    model = AutoModelForCausalLM.from_pretrained(config.model.name_or_path)
    *_, plan, _ = open_plans(config, ranks)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=config.train.learning_rate, eps=1e-5,
        betas=config.train.adam_betas, weight_decay=0,
    )  # fmt: skip
    steps, idle_experts = [], 0
    for k in range(config.train.steps):
        step = plan.step(k)
        loss = router_loss = 0.0
        for examples in (e for micro_step in step.micro_batches for e in micro_step if len(e)):
            router_logits = []
            for ids, mask in map(torch.from_numpy, plan.data.fetch(examples)):
                out = model(input_ids=ids[None])
                wanted = mask[1:].bool()
                logits, targets = out.logits[0, :-1][wanted], ids[1:][wanted]
                loss = loss + F.cross_entropy(logits, targets, reduction="sum")
                router_logits.append(out.router_logits)
            layers = [torch.cat(layer) for layer in zip(*router_logits, strict=True)]
            router_loss = router_loss + balance(layers, EXPERTS) * len(layers[0])
            idle_experts += sum(EXPERTS - len(layer.topk(2).indices.unique()) for layer in layers)
        loss, router_loss = loss / step.supervised_tokens, router_loss / step.tokens
        (loss + 0.3 * router_loss).backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
        optimizer.step()
        optimizer.zero_grad()
        steps.append([loss.item(), router_loss.item(), norm.item()])
    assert idle_experts > 0
    return dict(zip(("loss", "router_loss", "grad_norm"), np.transpose(steps), strict=True)), model


@pytest.mark.parametrize(
    "name, stage, ranks, batching, checkpointing, compiled",
    [
        ("mixtral", 0, 2, "bucketed", False, False),
        ("qwen3_moe", 1, 2, "packed", False, False),
        ("gpt_oss", 2, 2, "bucketed", True, False),
        ("mixtral", 3, 1, "bucketed", True, True),
        ("qwen3_moe", 3, 2, "bucketed", True, False),
    ],
)
def test_training_is_that_of_a_plain_loop(
    forks, tiny_config, tmp_path, sample_tokenizer, name, stage, ranks, batching,
    checkpointing, compiled,
):  # fmt: skip
    # With Adam's usual eps, rounding would decide how gradients near 0 change weights.
    config = tiny_config(
        model=save_model(tmp_path / "model", name, sample_tokenizer),
        ds_config=strategy(tmp_path, f"zero{stage}", {"optimizer.params.eps": 1e-5}),
        model__activation_checkpointing=checkpointing, model__compile=compiled,
        data__batching=batching, data__micro_batch_tokens=400, data__eval_sources=None,
        train__steps=4, train__lr_schedule="constant", train__warmup_examples=0,
        train__weight_decay=0.0, train__gradient_clipping=0.0, train__global_batch_size=11,
    )  # fmt: skip
    expected, model = train_plainly(config, ranks)
    # without generating code, which takes 20 s
    fast = {"torch.compile": "functools.partial(compile, backend='aot_eager')"}
    forks.finish(config, ranks=ranks, patches=fast)
    steps = read_metrics(tmp_path / "run")
    for key, plain in expected.items():
        np.testing.assert_allclose([s[key] for s in steps], plain, rtol=1e-5, err_msg=key)
    assert min(expected["router_loss"]) > 1.001, "the experts should not be balanced"

    out = export(tmp_path / "run", tmp_path / "hf")
    trained = AutoModelForCausalLM.from_pretrained(out).state_dict()
    for key, parameter in model.named_parameters():
        assert (trained[key] - parameter).norm() < 2e-5 * parameter.norm(), key
