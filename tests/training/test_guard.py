"""Steps with a bad gradient leave the weights alone.    pytest tests/training/test_guard.py"""

import json
import math
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from harness.inputs import SMALL_SIZES, chat, read_config, strategy, write_rows
from harness.runs import checkpoints, curve, read_metrics

from zerotrain.tools.open_plans import open_plans
from zerotrain.training.guard import is_bad_step, spike_limit


@pytest.fixture(scope="module")
def poisoned_model(tmp_path_factory, sample_tokenizer):
    """A model with finite weights that gives NaN for <|system|>: its embedding has no direction."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = LlamaConfig(
        **SMALL_SIZES, max_position_embeddings=512, initializer_range=0.1, bos_token_id=None,
        eos_token_id=1, rms_norm_eps=0.0,
    )  # fmt: skip
    model, folder = LlamaForCausalLM(shape), tmp_path_factory.mktemp("poisoned")
    with torch.no_grad():
        model.get_input_embeddings().weight[2] = 0
    model.save_pretrained(folder)
    sample_tokenizer.save_pretrained(folder)
    return folder


BAD = {2, 11, 17, 26}
"""Indices of rows that give a loss that is not finite."""
ROWS = [chat("Say it.", "So it is said.")] * 30
for index in BAD:
    system = {"role": "system", "content": "Be brief."}
    ROWS[index] = {"messages": [system, *ROWS[index]["messages"]]}

LAYOUTS = {
    "zero0 fp32": ("zero0", "fp32"),
    "zero2_offload bf16": ("zero2_offload", "bf16"),
    "zero3 fp32": ("zero3", "fp32"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bad_rows_are_skipped_and_named(forks, tiny_config, tmp_path, poisoned_model, layout):
    """Weights and optimizer state change in every step but the bad rows'. There are more such steps
    than may follow each other.
    """
    name, precision = LAYOUTS[layout]
    config = tiny_config(
        model=poisoned_model, ds_config=strategy(tmp_path, name),
        data__train_sources=[str(write_rows(tmp_path / "rows.jsonl", ROWS))],
        data__eval_sources=None, train__precision=precision, train__epochs=1,
        train__global_batch_size=2, train__learning_rate=0.01, train__warmup_examples=0,
    )  # fmt: skip
    finished = forks.finish(config, ranks=2, module="changed_weights")
    assert "finished: step 15, " in finished.output
    run = tmp_path / "run"
    plan = open_plans(read_config(config), 2)[2]
    bad = {k + 1: BAD.intersection(examples_of(plan, k)) for k in range(15)}
    events = [(e["name"], e["step"], e["rows"]) for e in read_metrics(run, "event")]
    assert events == [
        ("skipped_step", step, [f"{tmp_path}/rows.jsonl:{i + 1}" for i in sorted(rows)])
        for step, rows in bad.items()
        if rows
    ]
    assert len(events) > 3
    expected = [step for step, rows in bad.items() if not rows]
    for rank in (0, 1):
        assert json.loads((run / f"changed_{rank}.json").read_text()) == expected
    metrics = read_metrics(run)
    assert [m["step"] for m in metrics if not m["update_skipped"]] == expected


SPIKE = 50
"""Line of a row unlike all others, which comes after step 20."""


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_spike_is_skipped_and_named(forks, tiny_config, tmp_path, layout):
    """Weights and optimizer state stay; a resumed run skips the same step, also on one rank."""
    name, precision = LAYOUTS[layout]
    rows = [chat("Say it.", "So it is said.")] * 50
    rows[SPIKE - 1] = chat("Say it.", "QXZ ?! #@ 9471")
    config = tiny_config(
        ds_config=strategy(tmp_path, name), checkpoint={"every_steps": 21, "keep_last": 9},
        data__train_sources=[str(write_rows(tmp_path / "rows.jsonl", rows))],
        data__eval_sources=None, train__precision=precision, train__epochs=1,
        train__global_batch_size=2, train__warmup_examples=0, train__skip_spikes=1.5,
    )  # fmt: skip
    forks.finish(config, ranks=2, module="changed_weights")
    run, again = tmp_path / "run", tmp_path / "again"
    plan = open_plans(read_config(config), 2)[2]
    [spike] = [k + 1 for k in range(25) if SPIKE - 1 in examples_of(plan, k)]
    assert 21 < spike < 25
    [event] = read_metrics(run, "event")
    assert event["step"] == spike and f"{tmp_path}/rows.jsonl:{SPIKE}" in event["rows"]
    for rank in (0, 1):
        changed = json.loads((run / f"changed_{rank}.json").read_text())
        assert changed == [k for k in range(1, 26) if k != spike]
    flags = ["--checkpoint.resume", checkpoints(run)[0], "--output_dir"]
    forks.finish(config, *flags, again, ranks=2)
    expected = curve(run, "update_skipped")[21:]
    assert curve(again, "update_skipped") == expected
    forks.finish(config, *flags, tmp_path / "alone", ranks=1)
    found = curve(tmp_path / "alone", "update_skipped")
    tolerance = 1e-5 if precision == "fp32" else 1e-2
    np.testing.assert_allclose(found, expected, rtol=tolerance)


def test_a_spike_is_far_above_the_median_of_the_last_norms_that_are_numbers():
    norms = (1.0,) * 15 + (math.nan, math.inf) * 3 + (4.0,) * 8
    assert spike_limit(norms, 2) == 2 and spike_limit(norms, 1.5) == 1.5
    assert spike_limit(norms, None) == spike_limit(norms[:9], 2) == math.inf


@pytest.mark.parametrize(
    "loss, norm, is_skipped, in_fp16, in_bf16",
    [
        (1.0, 1.0, False, False, False),
        (1.0, 9.0, True, True, True),  # a spike
        (1.0, math.inf, True, False, True),  # fp16 lowers its loss scale
        (1.0, math.nan, True, False, True),
        (math.nan, math.nan, True, True, True),
        (math.inf, math.inf, True, True, True),
    ],
)
def test_the_search_for_the_loss_scale_is_not_a_bad_step(loss, norm, is_skipped, in_fp16, in_bf16):
    values = {"loss": loss, "grad_norm": norm, "update_skipped": is_skipped}

    def is_bad(is_fp16):
        fp16 = {"enabled": is_fp16, "loss_scale": 0}
        engine = SimpleNamespace(
            fp16_enabled=lambda: fp16["enabled"],
            dynamic_loss_scale=lambda: fp16["loss_scale"] == 0,
        )
        return is_bad_step(values, engine)

    assert [is_bad(True), is_bad(False)] == [in_fp16, in_bf16]


def examples_of(plan, step):
    return sorted(int(i) for ranks in plan.step(step).micro_batches for r in ranks for i in r)


def test_a_run_that_diverges_stops_and_names_its_last_good_checkpoint(
    forks, left_running, tiny_config, tmp_path
):
    """The learning rate overflows fp32 in the first step, at stage 0, where DeepSpeed itself would
    apply such gradients.
    """
    config = tiny_config(
        data__eval_sources=None, train__learning_rate=1e30, train__lr_schedule="constant",
        train__warmup_examples=0, checkpoint={"every_steps": 1, "keep_last": 9},
        ds_config="ds_configs/zero0.json",
    )  # fmt: skip
    finished = forks.train(config, ranks=2, module="changed_weights", code=1)
    assert "Traceback" not in finished.output and not left_running(), finished.output
    saved = checkpoints(tmp_path / "run")
    assert [path.name for path in saved] == [f"step_0000000{step}" for step in (1, 2, 3)]
    assert re.match(
        r"error: step 4: loss \S+, gradient norm \S+; 3 steps in a row were ", finished.error
    )
    assert [event["step"] for event in read_metrics(tmp_path / "run", "event")] == [2, 3, 4]
    assert json.loads((tmp_path / "run" / "changed_1.json").read_text()) == [1]
    again = tmp_path / "again"
    forks.finish(config, "--train.learning_rate", "1e-3", "--output_dir", again, ranks=2)
    options = re.findall(r"checkpoint\.\w+", finished.error)
    assert options == ["checkpoint.resume", "checkpoint.allow_plan_change"]
    resume, allow = (f"--{option}" for option in options)
    flags = [resume, checkpoints(again)[0], allow, "true", "--train.learning_rate", "1e-4"]
    forks.finish(config, *flags, "--output_dir", tmp_path / "third", ranks=2)


ONLY = 2**30
"""A loss scale with which each gradient overflows in fp16."""


@pytest.mark.parametrize(
    "scales",
    [{"initial_scale_power": 30, "min_loss_scale": ONLY, "hysteresis": 1}, {"loss_scale": ONLY}],
    ids=["searched", "fixed"],
)
def test_fp16_without_a_loss_scale_ends_with_a_line_and_its_cures_train(
    forks, left_running, tiny_config, tmp_path, scales
):
    """The weights do not change before."""
    file = strategy(tmp_path, "zero2", {f"fp16.{key}": value for key, value in scales.items()})
    config = tiny_config(
        ds_config=file, data__eval_sources=None, train__precision="fp16", train__steps=6,
    )  # fmt: skip
    # torch computes in fp16 on any CPU, but DeepSpeed allows it on few.
    accelerator = "deepspeed.accelerator.cpu_accelerator.CPU_Accelerator"
    allowed = {f"{accelerator}.is_fp16_supported": "lambda self: True"}
    finished = forks.train(config, ranks=2, module="changed_weights", code=1, patches=allowed)
    assert "Traceback" not in finished.output and not left_running(), finished.output
    changed = tmp_path / "run" / "changed_0.json"
    assert not changed.exists() or json.loads(changed.read_text()) == []
    if "loss_scale" in scales:
        [value] = re.findall(r"fp16\.loss_scale (\d+)", finished.error)
        strategy(tmp_path, "zero2", {"fp16.loss_scale": int(value)})
        cures = [["--ds_config", file]]
    else:
        [found] = re.findall(r"train\.precision (\w+) or (\w+)", finished.error)
        cures = [["--train.precision", precision] for precision in found]
    for i, cure in enumerate(cures):
        forks.finish(config, *cure, "--output_dir", tmp_path / f"cured_{i}", patches=allowed)
        last = read_metrics(tmp_path / f"cured_{i}")[-1]
        assert last["step"] == 6 and not last["update_skipped"]
