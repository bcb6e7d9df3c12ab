"""Mixtures of experts: router loss, and micro-batches without tokens for an expert.
pytest tests/variants/test_router_loss.py
"""

import json
from itertools import chain

import numpy as np
import pytest
import torch
from harness.inputs import SMALL_SIZES, read_config, rewrite, strategy
from harness.runs import (
    assert_same,
    checkpoints,
    determined,
    export,
    plainly,
    read_metrics,
    stop_after_one_step,
)
from transformers import AutoModelForCausalLM, GptOssConfig, MixtralConfig, Qwen3MoeConfig

from zerotrain.tools.open_plans import open_plans
from zerotrain.tools.plain_loop import read_rows

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
# With Adam's usual eps, rounding would decide how gradients near 0 change weights.
EPSILON = 1e-5


@pytest.fixture
def mixture(tiny_config, tmp_path, sample_tokenizer):
    """Writes the config of a run of 4 steps of a mixture: (model, ds_config, settings)."""

    def write(name="qwen3_moe", ds_config="zero1", **settings):
        torch.manual_seed(0)
        MODELS[name].eos_token_id = sample_tokenizer.eos_token_id
        model = AutoModelForCausalLM.from_config(MODELS[name])
        model.save_pretrained(tmp_path / "model", max_shard_size="20KB")
        sample_tokenizer.save_pretrained(tmp_path / "model")
        return tiny_config(
            model=tmp_path / "model",
            ds_config=strategy(tmp_path, ds_config, {"optimizer.params.eps": EPSILON}),
            **{"data__micro_batch_tokens": 400, "train__steps": 4, **settings},
        )  # fmt: skip

    return write


def losses(run_folder):
    return [step["router_loss"] for step in read_metrics(run_folder)]


def read_state(checkpoint):
    return json.loads((checkpoint / "trainer_state.json").read_text())


def expert_counts(run_folder):
    """What each checkpoint of a run has."""
    return [read_state(saved)["progress"]["expert_counts"] for saved in checkpoints(run_folder)]


@pytest.mark.parametrize(
    "name, batching, layouts, recompute, compiled",
    [
        ("mixtral", "bucketed", [("zero0", 2, 400)], False, False),
        ("qwen3_moe", "packed", [("zero1", 4, 4000), ("zero3", 1, 300)], False, False),
        ("qwen3_moe", "bucketed", [("zero3", 2, 400), ("zero2", 3, 300)], True, False),
        ("gpt_oss", "bucketed", [("zero2", 2, 400)], True, False),
        ("qwen3_moe", "bucketed", [("ulysses", 4, 400)], True, False),
        ("mixtral", "bucketed", [("zero3", 1, 400)], True, True),
    ],
)
def test_training_is_that_of_a_plain_loop_on_whole_steps(
    forks, mixture, tmp_path, sample_tokenizer, name, batching, layouts, recompute, compiled
):
    """The first step runs with one strategy, number of ranks and token budget, the others with the
    next. Ranks have different numbers of examples, some none.
    """
    config = mixture(
        name, layouts[0][0], data__batching=batching,
        model__activation_checkpointing=recompute, model__compile=compiled,
    )  # fmt: skip
    plain = plainly(config, sample_tokenizer, lambda model: model, EPSILON)
    # without generating code, which takes 20 s
    fast = {"torch.compile": "functools.partial(compile, backend='aot_eager')"}
    run_folder = tmp_path / "run"
    if len(layouts) > 1:
        stop_after_one_step(run_folder)
    for ds_config, ranks, budget in layouts:
        flags = "--ds_config", strategy(tmp_path, ds_config, {"optimizer.params.eps": EPSILON})
        flags += "--data.micro_batch_tokens", budget
        forks.finish(config, *flags, ranks=ranks, patches=fast)
    assert_same(run_folder, plain)
    np.testing.assert_allclose(losses(run_folder), plain.router_losses, rtol=1e-5)
    assert losses(run_folder)[0] == 2 and min(losses(run_folder)[1:]) > 2.002, "not balanced"
    trained = AutoModelForCausalLM.from_pretrained(export(run_folder, tmp_path / "hf"))
    for key, weight in trained.state_dict().items():
        expected = plain.weights[key].detach()
        assert (weight - expected).norm() < 2e-5 * expected.norm(), key
    *_, plan, eval_plans = open_plans(read_config(config), layouts[0][1])
    assert_evaluation(eval_plans, trained, read_metrics(run_folder, "eval")[-1])
    assert layouts[0][1] == 1 or has_idle_expert(plan, trained)


def assert_evaluation(plans, model, evaluation):
    """The router loss of a held-out set is transformers' own on all its rows in one batch."""
    [(name, plan)] = plans.items()
    rows = [ids[0] for ids, _ in read_rows(plan.data)]
    ids, mask = (
        torch.nn.utils.rnn.pad_sequence(each, batch_first=True)
        for each in (rows, [torch.ones_like(row) for row in rows])
    )
    expected = model(input_ids=ids, attention_mask=mask).aux_loss.item()
    assert evaluation[f"router_loss/{name}"] == pytest.approx(expected, rel=1e-5)


def has_idle_expert(plan, model):
    """Whether there is a micro-batch without tokens for an expert."""
    rows = read_rows(plan.data)
    for examples in chain(*(ranks for k in range(4) for ranks in plan.step(k).micro_batches)):
        of_rows = [model(input_ids=rows[i][0]).router_logits for i in examples]
        layers = map(torch.cat, zip(*of_rows, strict=True))
        if any(len(layer.topk(2).indices.unique()) < EXPERTS for layer in layers):
            return True
    return False


def test_counts_are_of_the_last_applied_step_and_resume_bit_for_bit(forks, mixture, tmp_path):
    """Step 2 is skipped, and other steps compute their first micro-batch twice."""
    config = mixture(train__steps=5, checkpoint={"every_steps": 1, "keep_last": 9})
    skipped = {"train.spike_limit": "lambda norms, times: 0 if len(norms) == 1 else 1e9"}
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    forks.finish(config, "--output_dir", whole, ranks=2, patches=skipped)
    counts = expert_counts(whole)
    assert counts[0] == counts[1] and len({*map(tuple, counts)}) == 4
    for step, of_step in zip(read_metrics(whole), counts, strict=True):
        choices = 2 * SIZES["num_hidden_layers"] * step["tokens"]
        assert step["update_skipped"] or sum(of_step) == choices
    for at in (1, 2):
        stop_after_one_step(cut) if at == 1 else (cut / "stop").touch()
        forks.finish(config, "--output_dir", cut, ranks=2, patches=skipped)
    again = "--train.replay_every", 1, "--eval.every_steps", 1
    forks.finish(config, "--output_dir", cut, *again, ranks=2, patches=skipped)
    assert determined(cut) == determined(whole) and losses(cut) == losses(whole)
    assert expert_counts(cut) == counts


def test_without_counts_a_step_has_no_router_gradient_and_wrong_counts_are_refused(
    forks, mixture, tmp_path
):
    config = mixture(train__steps=2, checkpoint={"every_steps": 1, "keep_last": 9})
    forks.finish(config)
    first, _ = checkpoints(tmp_path / "run")
    own = losses(tmp_path / "run")
    assert own[0] == 2 < own[1]
    weights = "--checkpoint.weights_only", "true", "--checkpoint.resume", first
    forks.finish(config, *weights, "--output_dir", tmp_path / "weights")
    assert losses(tmp_path / "weights")[0] == 2
    resumed = "--checkpoint.resume", first, "--output_dir", tmp_path / "resumed"
    saved = read_state(first)
    good = saved["progress"].pop("expert_counts")
    for bad in ([0] * EXPERTS, good[:-1], [-1, *good[1:]], [2.5, *good[1:]], [2**70, *good[1:]]):
        changed = saved | {"progress": saved["progress"] | {"expert_counts": bad}}
        rewrite(first, "trainer_state.json", json.dumps(changed).encode())
        assert "expert_counts" in forks.refusal(config, *resumed), bad
    rewrite(first, "trainer_state.json", json.dumps(saved).encode())
    forks.finish(config, *resumed)
    assert losses(tmp_path / "resumed") == [2]
