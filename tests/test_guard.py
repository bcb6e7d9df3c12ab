"""Steps that must not spoil the weights.    pytest tests/test_guard.py"""

import json
import re

import pytest
import torch
from conftest import read_metrics, strategy, write_rows

from zerotrain.checkpoint.run_folder import list_complete
from zerotrain.config.parse import parse_command_line
from zerotrain.config.schema import GuardConfig
from zerotrain.model.guard import Guard, GuardState
from zerotrain.tools.open_plans import open_plans


@pytest.fixture(scope="module")
def poisoned_model(tmp_path_factory, sample_tokenizer):
    """A model in which the embedding of <|system|> is infinite."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=320, hidden_size=32, num_hidden_layers=2, intermediate_size=64,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
        initializer_range=0.1, tie_word_embeddings=False, bos_token_id=None, eos_token_id=1,
    )  # fmt: skip
    model, folder = LlamaForCausalLM(shape), tmp_path_factory.mktemp("poisoned")
    with torch.no_grad():
        model.get_input_embeddings().weight[2] = torch.inf
    model.save_pretrained(folder)
    sample_tokenizer.save_pretrained(folder)
    return folder


def chat(question, answer, *before):
    return {"messages": [*before, {"role": "user", "content": question},
                         {"role": "assistant", "content": answer}]}  # fmt: skip


ROWS = [chat("Say it.", "So it is said.")] * 30
ROWS[11] = chat("Say it.", "So it is said.", {"role": "system", "content": "Be brief."})
ROWS[23] = chat("#%&", "]@~ `qXz {J|K} ^W_V!")
"""Known by heart after some steps, but for a row with an infinite loss, and one unlike the others.
"""

LAYOUTS = {
    "zero0 fp32": ("zero0", "fp32"),
    "zero2_offload bf16": ("zero2_offload", "bf16"),
    "zero3 fp32": ("zero3", "fp32"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_bad_row_is_skipped_and_named(forks, tiny_config, tmp_path, poisoned_model, layout):
    """Neither weights nor the optimizer's state change in its step, and only there. The same with a
    spike of the loss.
    """
    name, precision = LAYOUTS[layout]
    config = tiny_config(
        model=poisoned_model, ds_config=str(strategy(tmp_path, name)),
        data__train_sources=[str(write_rows(tmp_path / "rows.jsonl", ROWS))],
        data__eval_sources=None, train__precision=precision, train__epochs=1,
        train__global_batch_size=2, train__learning_rate=0.01, train__warmup_examples=0,
        guard={"on_spike": "skip"},
    )  # fmt: skip
    finished = forks.train(config, ranks=2, module="guarded")
    assert finished.code == 0 and "finished: step 15, " in finished.output, finished.output
    run = tmp_path / "run"
    plan = open_plans(parse_command_line(["--config", str(config)]).config, 2)[2]
    steps_of = {
        line: [k + 1 for k in range(15) if line - 1 in examples_of(plan, k)] for line in (12, 24)
    }
    skipped = read_metrics(run, "event")
    spikes = [event for event in skipped if event["name"] == "loss_spike"]
    not_finite = [event for event in skipped if event["name"] == "skipped_step"]
    assert [line["step"] for line in not_finite] == steps_of[12]
    assert [line["step"] for line in spikes] == steps_of[24]
    assert all(event["rows"] == [f"{tmp_path}/rows.jsonl:12"] for event in not_finite)
    for event in spikes:
        rows = [f"{tmp_path}/rows.jsonl:{i + 1}" for i in examples_of(plan, event["step"] - 1)]
        assert sorted(event["rows"]) == sorted(rows)
    expected = [k for k in range(1, 16) if k not in [event["step"] for event in skipped]]
    for rank in (0, 1):
        assert json.loads((run / f"changed_{rank}.json").read_text()) == expected
    metrics = read_metrics(run)
    assert [m["step"] for m in metrics if not m["update_skipped"]] == expected


def examples_of(plan, step):
    return sorted(int(i) for ranks in plan.step(step).micro_batches for r in ranks for i in r)


def test_a_run_that_diverges_stops_and_names_its_last_good_checkpoint(forks, tiny_config, tmp_path):
    """A learning rate that overflows fp32 in the first step, at stage 0, where DeepSpeed itself
    would apply such gradients.
    """
    config = tiny_config(
        data__eval_sources=None, train__learning_rate=1e30, train__lr_schedule="constant",
        train__warmup_examples=0, checkpoint={"every_steps": 1, "keep_last": 9},
        ds_config="ds_configs/zero0.json",
    )  # fmt: skip
    finished = forks.train(config, ranks=2, module="guarded")
    assert finished.code == 1 and "Traceback" not in finished.output, finished.output
    [error] = finished.errors
    saved = list_complete(tmp_path / "run" / "checkpoints")
    assert [path.name for path in saved] == [f"step_0000000{step}" for step in (1, 2, 3)]
    assert re.match(r"error: step 4: loss \S+, gradient norm \S+; 3 steps in a row were ", error)
    assert [event["step"] for event in read_metrics(tmp_path / "run", "event")] == [2, 3, 4]
    assert json.loads((tmp_path / "run" / "changed_1.json").read_text()) == [1]


def test_a_spike_stops_the_run_also_after_a_resume(forks, tiny_config, tmp_path):
    """The window of losses is in the checkpoint: after 4 steps more it would not be full."""
    rows = [ROWS[0]] * 29
    rows[23] = ROWS[23]
    config = tiny_config(
        data__train_sources=[str(write_rows(tmp_path / "rows.jsonl", rows))],
        data__eval_sources=None, train__epochs=2, train__global_batch_size=2,
        train__learning_rate=0.01, train__warmup_examples=0, checkpoint={"every_steps": 1},
        guard={"on_spike": "stop"},
    )  # fmt: skip
    first = forks.train(config, module="guarded")
    assert first.code == 1 and "; guard.on_spike is stop" in first.errors[0]
    steps = [line["step"] for line in read_metrics(tmp_path / "run")]
    saved = list_complete(tmp_path / "run" / "checkpoints")[-1]
    assert 9 <= steps[-1] < 29 and saved.name == f"step_{steps[-1] - 1:08d}"
    again = forks.train(config, module="guarded")
    assert again.code == 1 and again.errors == first.errors, again.output
    warned = forks.train(config, "--guard.on_spike", "warn", module="guarded")
    assert warned.code == 0 and re.search(r"^step \d+/30  loss \S+ is above", warned.output, re.M)
    assert not any(line["update_skipped"] for line in read_metrics(tmp_path / "run")[-10:])


def spike_limit(losses, on_spike="warn"):
    state = GuardState(losses)
    return Guard(GuardConfig(on_spike=on_spike), state, ranks=None).spike_limit()


def test_the_spike_score():
    """Median 2, median absolute deviation .1: one deviation is .14826."""
    losses = [1.8, 1.9, 1.9, 2.0, 2.0, 2.1, 2.1, 2.2] * 8
    assert spike_limit(losses) == pytest.approx(2 + 10 * 0.14826)
    assert spike_limit(losses[1:]) == spike_limit(losses, "off") == float("inf")
    half_are_outliers = [*losses[:40], *[90.0] * 24]
    assert spike_limit(half_are_outliers) < 9
    assert spike_limit([1.0] * 64) == pytest.approx(1.1), "at least 1 % of the median"
