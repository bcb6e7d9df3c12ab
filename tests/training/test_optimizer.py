"""Every schedule works, without an update at a rate of 0.
pytest tests/training/test_optimizer.py"""

import dataclasses
from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch
from deepspeed.runtime import lr_schedules
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, Trainer

from zerotrain.config.schema import TrainConfig
from zerotrain.model.architecture import auto_class
from zerotrain.runtime.errors import UserError
from zerotrain.tools.small_config import small_config
from zerotrain.training.optimizer import make_schedule, parameter_groups, warmup_steps

TRAIN = TrainConfig(global_batch_size=10, learning_rate=1e-3, steps=20, warmup_examples=40)
SCHEDULES = {
    "constant": {}, "constant_with_warmup": {}, "linear": {}, "cosine": {},
    "cosine_with_restarts": {}, "polynomial": {}, "inverse_sqrt": {},
    "cosine_with_min_lr": {"min_lr": 1e-5}, "warmup_stable_decay": {"num_decay_steps": 5},
}  # fmt: skip


def schedule(name, steps=20, arguments=None, **options):
    train = dataclasses.replace(
        TRAIN, steps=steps, lr_schedule=name, lr_schedule_args=arguments or {}, **options
    )
    return make_schedule(train, SimpleNamespace(mean_batch=10, mean_examples=10))


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_warms_up_and_wastes_no_update(name):
    warmup = 0 if name == "constant" else 40
    found = schedule(name, arguments=SCHEDULES[name], warmup_examples=warmup)
    rates = [found.rate(step) for step in range(20)]
    assert min(rates) > 0 and max(rates) == pytest.approx(1e-3)
    if warmup:
        assert rates[:4] == pytest.approx([2.5e-4, 5e-4, 7.5e-4, 1e-3])
    assert [found.rate(step) for step in (7, 3)] == [rates[7], rates[3]]  # in any order


@pytest.mark.parametrize("scaling, factor", [("none", 1), ("sqrt", 2**0.5), ("linear", 2)])
def test_warm_up_is_in_examples_and_the_rate_follows_the_mean_batch(scaling, factor):
    """The global batch is in tokens. Steps have a little less than the config asks for."""
    batch = {"global_batch_size": None, "global_batch_tokens": 1000}
    train = dataclasses.replace(
        TRAIN, **batch, lr_schedule="linear", lr_scaling=scaling, reference_global_batch=450
    )  # fmt: skip
    found = make_schedule(train, SimpleNamespace(mean_batch=900, mean_examples=10))
    assert found.warmup_steps == 4 and found.peak == pytest.approx(factor * 1e-3)
    assert [warmup_steps(train, n) for n in (20, 18, 16, 80, 90)] == [2, 2, 3, 1, 1]


@pytest.mark.parametrize("name, own", [
    ("WarmupLR", {}), ("WarmupDecayLR", {"warmup_max_lr": 1e-3, "total_num_steps": 20}),
    ("WarmupCosineLR", {"total_num_steps": 20}),
])  # fmt: skip
def test_a_deepspeed_scheduler_has_the_same_rates_as_under_trainer(name, own):
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1e-3)
    theirs = getattr(lr_schedules, name)(optimizer, warmup_num_steps=4, **own)
    ours = schedule(name)
    for step in range(20):
        assert ours.rate(step) == pytest.approx(optimizer.param_groups[0]["lr"])
        theirs.step()
    with pytest.raises(UserError, match="warmup_num_steps"):  # train.warmup_examples has it
        schedule(name, arguments={"warmup_num_steps": 4})


def test_a_rate_depends_on_the_current_schedule_and_the_step_alone():
    short, long = schedule("linear", 6), schedule("linear", 9)
    assert short.rate(6) == 0 and long.rate(6) == pytest.approx(1e-3 * 3 / (9 + 1 - 4))
    # The epoch began with a different batch, in which 3 more steps were taken.
    plan = SimpleNamespace(mean_batch=10, mean_examples=10, steps_per_epoch=12, step_shift=3)
    train = dataclasses.replace(TRAIN, steps=None, epochs=1, lr_schedule="linear")
    assert make_schedule(train, plan).rate(6) == schedule("linear", 12).rate(9)


def test_weight_decay_is_trainers_but_for_vectors_and_state_space_layers():
    """Small models of all types, without weights."""
    models = []
    for kind in MODEL_FOR_CAUSAL_LM_MAPPING:
        with suppress(Exception), torch.device("meta"):  # Some types need other small sizes.
            config = small_config(kind())
            models.append(auto_class(config).from_config(config))
    assert len(models) > 150
    seen = set()
    for model in models:
        names = {p: name for name, p in model.named_parameters() if p.requires_grad}
        groups = parameter_groups(model, 0.1)
        ours = {names[p] for group in groups if group["weight_decay"] for p in group["params"]}
        theirs = {*names.values()} & {*Trainer.get_decay_parameter_names(None, model)}
        assert ours <= theirs
        for name in theirs - ours:
            own = name.rpartition(".")[2]
            assert model.get_parameter(name).dim() == 1 or own in ("A_log", "D"), name
        seen |= {name.rpartition(".")[2] for name in names.values() if name not in ours}
    assert seen >= {"A_log", "D", "dt_bias", "gate_up_proj_bias", "down_proj_bias"}
