"""Mixtures of experts: router loss, load of the experts, ranks without tokens for one.

pytest tests/variants/test_router_loss.py
"""

from collections import defaultdict

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


@pytest.fixture(scope="module")
def folders(tmp_path_factory, sample_tokenizer):
    made = {}
    for name, config in MODELS.items():
        torch.manual_seed(0)
        made[name] = tmp_path_factory.mktemp(name)
        config.eos_token_id = sample_tokenizer.eos_token_id
        model = AutoModelForCausalLM.from_config(config)
        for layer in model.model.layers if name == "gpt_oss" else ():
            torch.nn.init.constant_(layer.mlp.router.bias[0], -1e3)  # no token chooses expert 0
        model.save_pretrained(made[name], max_shard_size="20KB")
        sample_tokenizer.save_pretrained(made[name])
    return made


def chosen_experts(router_logits):
    """Tokens of each expert, int64 [layers, experts]."""
    return torch.stack([
        F.one_hot(layer.topk(2).indices, EXPERTS).sum((0, 1)) for layer in router_logits
    ])  # fmt: skip


def train_plainly(config_file, ranks):
    """Metrics by name, and the model; one example at a time, without padding. The router loss is
    one of each rank's micro-batch.
    """
    config = read_config(config_file)
    model = AutoModelForCausalLM.from_pretrained(config.model.name_or_path)
    trained = [p for p in model.parameters() if p.requires_grad]
    *_, plan, _ = open_plans(config, ranks)
    optimizer = torch.optim.AdamW(trained, lr=config.train.learning_rate, eps=1e-5,
                                  betas=config.train.adam_betas, weight_decay=0)  # fmt: skip
    metrics, without_tokens = defaultdict(list), 0
    for k in range(config.train.steps):
        step = plan.step(k)
        loss, router_loss = torch.zeros((2,), dtype=torch.float64)
        for group in (g for micro_step in step.micro_batches for g in micro_step if len(g)):
            of_group, tokens = [], 0
            for ids, mask in map(torch.from_numpy, plan.data.fetch(group)):
                ids = ids[None]
                out = model(input_ids=ids)
                wanted = mask[1:].bool()
                logits, targets = out.logits[0, :-1][wanted], ids[0, 1:][wanted]
                loss = loss + F.cross_entropy(logits, targets, reduction="sum")
                of_group.append(out.router_logits)
                tokens += ids.numel()
            layers = [torch.cat(layer) for layer in zip(*of_group, strict=True)]
            router_loss = router_loss + balance(layers, EXPERTS) * tokens
            without_tokens += int((chosen_experts(layers) == 0).sum())
        loss, router_loss = loss / step.supervised_tokens, router_loss / step.tokens
        (loss + 0.3 * router_loss).backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in trained])
        optimizer.step()
        optimizer.zero_grad()
        for name, value in {
            "loss": loss, "router_loss": router_loss, "grad_norm": norm,
        }.items():  # fmt: skip
            metrics[name].append(value.item())
    assert without_tokens > 0, "every rank has tokens for every expert in every micro-step"
    return metrics, model


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
    forks, folders, tiny_config, tmp_path, name, stage, ranks, batching,
    checkpointing, compiled,
):  # fmt: skip
    # with an eps near Adam's usual one, rounding decides what gradients near 0 change
    config = tiny_config(
        model=folders[name],
        ds_config=strategy(tmp_path, f"zero{stage}", {"optimizer.params.eps": 1e-5}),
        model__activation_checkpointing=checkpointing, model__compile=compiled,
        data__batching=batching, data__micro_batch_tokens=400, data__eval_sources=None,
        train__steps=4, train__lr_schedule="constant", train__warmup_examples=0,
        train__weight_decay=0.0, train__gradient_clipping=0.0, train__global_batch_size=11,
    )  # fmt: skip
    expected, model = train_plainly(config, ranks)
    forks.finish(config, ranks=ranks, module="changed_blocks")
    steps = read_metrics(tmp_path / "run")
    for key, plain in expected.items():
        np.testing.assert_allclose([s[key] for s in steps], plain, rtol=1e-5, err_msg=key)
    assert min(expected["router_loss"]) > 1.001, "the experts should not be balanced"

    out = export(tmp_path / "run", tmp_path / "hf")
    trained = AutoModelForCausalLM.from_pretrained(out).state_dict()
    for key, parameter in model.named_parameters():
        assert (trained[key] - parameter).norm() < 2e-5 * parameter.norm(), key
