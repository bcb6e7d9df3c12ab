"""train.py on real processes against a plain torch loop.    pytest tests/test_training.py"""

import json
import os
import re
import shutil
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import (
    REPO,
    determined,
    logged,
    ranks_of,
    read_metrics,
    run,
    save_tiny_llama,
    start,
    wait_until,
    write_rows,
)
from plain_loop import train_plainly
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from checkpoint.export import export_checkpoint
from checkpoint.run_folder import list_complete
from checkpoint.shards import Shards
from config.parse import parse_command_line
from model.optimizer import make_schedule

SERVER = []


@pytest.fixture(autouse=True)
def use_forks(forks):
    SERVER[:] = [forks]


def train(config, *flags, ranks):
    """With forked ranks: a launcher and importing torch and DeepSpeed would add 10 s per run;
    tests/test_commands.py tests the launchers.
    """
    return SERVER[0].train(config, *flags, ranks=ranks)


def export(run_folder, out):
    """Weights of the run's last checkpoint, as a Hugging Face folder has them."""
    export_checkpoint(list_complete(run_folder / "checkpoints")[-1], out)
    return load_file(out / "model.safetensors")


def assert_weights_close(ours, reference, tolerance):
    """Relative L2 distance of every tensor."""
    assert set(ours) == {n for n in reference if n != "lm_head.weight"}  # tied: stored once
    for name, tensor in ours.items():
        expected = reference[name].detach()
        distance = (tensor - expected).norm() / expected.norm()
        assert distance < tolerance, f"{name}: {distance:.1e}"


@pytest.fixture(scope="module")
def plain(tmp_path_factory, tiny_model, chat_rows, sample_tokenizer):
    """The reference run, once for all layouts."""
    return {}


LAYOUTS = {
    "1 rank": (1, 1024),
    "2 ranks": (2, 1024),
    "2 ranks, more micro-steps": (2, 300),
}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_equals_a_plain_loop(tiny_config, tmp_path, sample_tokenizer, plain, stage, layout):
    ranks, budget = LAYOUTS[layout]
    config = tiny_config(
        data__micro_batch_tokens=budget, data__batching="bucketed", model__loss_chunk_tokens=60,
        ds_config=f"ds_configs/zero{stage}.json",
    )  # fmt: skip
    if not plain:
        plain["run"] = train_plainly(config, sample_tokenizer)
    losses, norms, rates, (before, after), weights = plain["run"]
    finished = train(config, ranks=ranks)
    assert finished.code == 0, finished.output

    steps = read_metrics(tmp_path / "run")
    assert len(steps) == len(losses) == 12
    micro_steps = {step["micro_steps"] for step in steps}
    if layout == "2 ranks, more micro-steps":
        assert len(micro_steps) > 1 and min(micro_steps) > 1, "accumulation should vary"
    np.testing.assert_allclose([s["loss"] for s in steps], losses, rtol=1e-5)
    np.testing.assert_allclose([s["grad_norm"] for s in steps], norms, rtol=1e-5)
    np.testing.assert_allclose([s["lr"] for s in steps], rates, rtol=1e-9)
    evals = [e["eval_loss"] for e in read_metrics(tmp_path / "run", "eval")]
    np.testing.assert_allclose(evals, [before, after], rtol=1e-5)
    assert_weights_close(export(tmp_path / "run", tmp_path / "hf"), weights, 1e-5)


@pytest.mark.parametrize("stage, checkpointing", [(1, False), (3, True)])
def test_packed_examples_equal_a_plain_loop(
    tiny_config, tmp_path, sample_tokenizer, plain, stage, checkpointing
):
    config = tiny_config(
        data__micro_batch_tokens=300, model__activation_checkpointing=checkpointing,
        model__loss_chunk_tokens=60, ds_config=f"ds_configs/zero{stage}.json",
    )  # fmt: skip
    if not plain:
        plain["run"] = train_plainly(config, sample_tokenizer)
    losses, norms, _, (before, after), weights = plain["run"]
    finished = train(config, ranks=2)
    assert finished.code == 0 and "packed: no padding" in finished.output, finished.output
    steps = read_metrics(tmp_path / "run")
    assert all(s["padding_efficiency"] == 1 for s in steps)
    np.testing.assert_allclose([s["loss"] for s in steps], losses, rtol=1e-5)
    np.testing.assert_allclose([s["grad_norm"] for s in steps], norms, rtol=1e-5)
    evals = [e["eval_loss"] for e in read_metrics(tmp_path / "run", "eval")]
    np.testing.assert_allclose(evals, [before, after], rtol=1e-5)
    assert_weights_close(export(tmp_path / "run", tmp_path / "hf"), weights, 1e-5)


@pytest.mark.parametrize("name", ["zero2_offload", "zero3_offload"])
def test_offload_equals_a_plain_loop(tiny_config, tmp_path, sample_tokenizer, plain, name):
    """With DeepSpeed's CPU Adam where g++ can compile it (40 s, once), else with torch's."""
    ds_config = json.loads((REPO / "ds_configs" / f"{name}.json").read_text())
    if shutil.which("g++") is None:
        ds_config["optimizer"]["params"]["torch_adam"] = True
    (tmp_path / "ds.json").write_text(json.dumps(ds_config))
    config = tiny_config(data__micro_batch_tokens=300, ds_config=str(tmp_path / "ds.json"))
    if not plain:
        plain["run"] = train_plainly(config, sample_tokenizer)
    losses, norms, *_, weights = plain["run"]
    finished = train(config, ranks=2)
    assert finished.code == 0, finished.output
    steps = read_metrics(tmp_path / "run")
    np.testing.assert_allclose([s["loss"] for s in steps], losses, rtol=1e-5)
    np.testing.assert_allclose([s["grad_norm"] for s in steps], norms, rtol=1e-5)
    assert_weights_close(export(tmp_path / "run", tmp_path / "hf"), weights, 1e-5)


SIXTEEN_BITS = [("bf16", 0), *((p, n) for p in ("bf16", "fp16") for n in (1, 2, 3))]
SIXTEEN_BITS += [(p, f"{n}_offload") for p in ("bf16", "fp16") for n in (2, 3)]


@pytest.mark.parametrize("precision, stage", SIXTEEN_BITS)
def test_16_bits_follow_the_fp32_curve(
    tiny_config, tmp_path, sample_tokenizer, plain, precision, stage
):
    """fp16 at stage 0 is refused: tests/test_ds_check.py."""
    ds_config = json.loads((REPO / "ds_configs" / f"zero{stage}.json").read_text())
    ds_config["optimizer"]["params"]["torch_adam"] = True
    ds_config["fp16"]["initial_scale_power"] = 8  # from 16 on it would skip updates at first
    (tmp_path / "ds.json").write_text(json.dumps(ds_config))
    config = tiny_config(
        data__micro_batch_tokens=300,
        train__precision=precision,
        ds_config=str(tmp_path / "ds.json"),
    )
    if not plain:
        plain["run"] = train_plainly(config, sample_tokenizer)
    losses, norms, *_ = plain["run"]
    module = "fp16_anyway" if precision == "fp16" else "train"
    finished = SERVER[0].train(config, ranks=2, module=module)
    assert finished.code == 0, finished.output
    steps = read_metrics(tmp_path / "run")
    assert not any(s["update_skipped"] for s in steps)
    # bf16 has 8 bits of mantissa, 0.4 %, fp16 11; the loss averages over hundreds of tokens
    coarse = 1 if precision == "bf16" else 0.2
    np.testing.assert_allclose([s["loss"] for s in steps], losses, rtol=coarse * 5e-3)
    np.testing.assert_allclose([s["grad_norm"] for s in steps], norms, rtol=coarse * 5e-2)
    shards = Shards(list_complete(tmp_path / "run" / "checkpoints")[-1])
    for path in shards.folder.iterdir():  # the types that may be unpickled are enough
        assert shards.load(path, "cpu")
    assert all(torch.isfinite(shards.weight(name)).all() for name in shards.names())


def test_stage_0_takes_its_norm_in_fp64(tiny_config, tmp_path, sample_tokenizer, chat_rows):
    """Ten million parameters, ten clipped steps: torch's fp32 norm on CPU is off by 1e-3 here."""
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=320, hidden_size=512, intermediate_size=5632, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=4, tie_word_embeddings=True,
    )  # fmt: skip
    model = LlamaForCausalLM(shape)
    assert sum(p.numel() for p in model.parameters()) > 9e6
    model.save_pretrained(tmp_path / "model")
    sample_tokenizer.save_pretrained(tmp_path / "model")
    rows = sorted(chat_rows, key=lambda row: len(json.dumps(row)))[:20]
    config = tiny_config(
        model=tmp_path / "model", ds_config="ds_configs/zero0.json",
        data__train_sources=[str(write_rows(tmp_path / "short.jsonl", rows))],
        data__eval_sources=[str(write_rows(tmp_path / "one.jsonl", rows[:1]))],
        train__epochs=1, train__global_batch_size=2, train__warmup_examples=2,
        train__learning_rate=3e-4,
    )  # fmt: skip
    losses, norms, *_ = train_plainly(config, sample_tokenizer)
    finished = train(config, ranks=1)
    assert finished.code == 0, finished.output
    steps = read_metrics(tmp_path / "run")
    assert len(steps) == 10 and min(norms) > 0.5, "each step is clipped"
    np.testing.assert_allclose([s["grad_norm"] for s in steps], norms, rtol=1e-5)
    np.testing.assert_allclose([s["loss"] for s in steps], losses, rtol=1e-5)


# --------------------------------------------------------------------------------------------------
# Stop, resume


@pytest.mark.parametrize("stage, how", [(0, "killed"), (3, "preempted")])
def test_stopped_and_resumed_equals_uninterrupted_bit_for_bit(
    tiny_config, tmp_path, tiny_model_with_dropout, stage, how
):
    """The run is killed between two checkpoints; or one of two ranks is preempted and both save."""
    config = tiny_config(
        model=tiny_model_with_dropout,
        ds_config=f"ds_configs/zero{stage}.json",
        train__epochs=None, train__steps=24, eval__every_steps=7,
        checkpoint={"every_steps": 5, "keep_last": 2},
    )  # fmt: skip
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert (finished := train(config, "--output_dir", whole, ranks=2)).code == 0, finished.output

    process = SERVER[0].start(config, "--output_dir", cut, ranks=2)
    process.until((cut / "checkpoints" / "step_00000010").exists)
    if how == "killed":
        process.kill(0)
        process.kill(1)
    else:
        process.kill(1, signal.SIGUSR1)
    assert process.wait().code != 0
    done = read_metrics(cut)[-1]["step"]
    assert 10 <= done < 24, "the run should have been stopped in the middle"
    saved = list_complete(cut / "checkpoints")[-1].name
    assert how == "killed" or saved == f"step_{done:08d}", (
        "it saves the step in which it is preempted"
    )

    finished = train(config, "--output_dir", cut, ranks=2)
    assert finished.code == 0 and "resuming from" in finished.output, finished.output
    lines = [determined(folder) for folder in (whole, cut)]
    assert lines[0] == lines[1] and len(lines[0]) == 24, "each step once, each number the same"
    evals = [[e["eval_loss"] for e in read_metrics(f, "eval")] for f in (whole, cut)]
    assert evals[0] == evals[1] and len(evals[0]) == 1 + 3 + 1

    weights = [export(f, tmp_path / f"hf_{f.name}") for f in (whole, cut)]
    assert all((weights[0][name] == weights[1][name]).all() for name in weights[0])
    steps = [c.name for c in list_complete(cut / "checkpoints")]
    assert steps[-2:] == ["step_00000020", "step_00000024"]
    assert len(steps) == 3, "and the one resumed from"

    if stage > 0:
        return  # a finished run started again is the same for all
    again = train(config, "--output_dir", cut, ranks=2)
    assert again.code == 0 and "finished: step 24" in again.output, again.output


def test_another_length_resumes_at_the_rate_of_its_own_schedule(tiny_config, tmp_path):
    """A finished run of 6 steps is resumed to 9, then to 12 with another warm-up on two ranks,
    which converts the checkpoint: every step runs at the current schedule's rate.
    """
    config = tiny_config(train__epochs=None, train__steps=6)
    flags = [
        [],
        ["--train.steps", "9"],
        ["--train.steps", "12", "--train.warmup_examples", "120"],
    ]
    rates, moves = [], []
    for ranks, added in zip((1, 1, 2), flags, strict=True):
        finished = train(config, *added, ranks=ranks)
        assert finished.code == 0, finished.output
        parsed = parse_command_line(["--config", str(config), *added]).config
        rates.append(list(map(make_schedule(parsed.train, parsed.train.steps, 12).rate, range(12))))
        moves.append(re.findall("learning rate: step .* moves from .* to .*", finished.output))
    expected = rates[0][:6] + rates[1][6:9] + rates[2][9:12]
    assert min(expected) > 0
    lines = read_metrics(tmp_path / "run")
    assert [line["step"] for line in lines] == list(range(1, 13))
    assert [line["lr"] for line in lines] == expected
    assert not moves[0] and len(moves[1]) == len(moves[2]) == 1
    assert "step 7 moves from 0 (linear to 0.003 over 6 steps, warm-up 2)" in moves[1][0]
    assert "over 12 steps, warm-up 10)" in moves[2][0]


def test_a_hang_ends_at_the_configured_time_out(tiny_config, tmp_path):
    """One rank hangs; the other waits for it in a collective of ZeRO's own group."""
    config = tiny_config(
        train__epochs=None, train__steps=5000, distributed={"timeout_seconds": 8}
    )  # fmt: skip
    log = (tmp_path / "log").open("w+")
    records, secret = tmp_path / "run" / "flight_records", tmp_path / "secret"
    records.mkdir(parents=True, mode=0o777)
    (records / "rank_0").symlink_to(secret)  # of somebody who knew the name
    process = start(config, ranks=2, stdout=log, TORCH_FR_BUFFER_SIZE="2000")
    wait_until(lambda: logged(tmp_path / "run"), process)
    waits, hangs = ranks_of(process)
    stack = ""
    while "deepspeed/runtime/zero" not in stack:  # rather than in a collective of train.py
        hangs.resume()
        time.sleep(0.1)  # a few steps
        hangs.suspend()
        began = time.monotonic()
        time.sleep(0.5)
        stack = run(["py-spy", "dump", "--pid", waits.pid]).output
    assert " train_step (" in stack, stack
    wait_until(lambda: "Timed out" in Path(log.name).read_text(), process)
    assert time.monotonic() - began < 25, "gloo's own time-out is 30 minutes"
    wait_until((records / "rank_0").is_file, process)
    os.killpg(process.pid, signal.SIGKILL)
    modes = [path.lstat().st_mode for path in (records, records / "rank_0")]
    assert [oct(mode) for mode in modes] == ["0o40700", "0o100600"] and not secret.exists()
    trace = [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace", records]
    analysis = run([*trace, "--prefix", "rank_", "--allow-incomplete-ranks"])
    assert "missed FR dumps from ranks ({1})" in analysis.output, analysis.output
    output = Path(log.name).read_text()
    assert "deepspeed/runtime/zero" in output.split("Traceback")[1], output


def test_zero3_loads_partitioned(forks, tiny_config, tmp_path, sample_tokenizer):
    """Pretrained or randomly initialized, no rank ever holds more than its own shard and the
    current parameter, copied once to partition it; the first rank also reads the checkpoint.
    """
    model = save_tiny_llama(tmp_path / "model", sample_tokenizer, dropout=0.0, layers=12)
    config = tiny_config(model=model, ds_config="ds_configs/zero3.json")
    finished = forks.train(config, ranks=2, module="load_peak")
    assert finished.code == 0, finished.output
    held = [json.loads(path.read_text()) for path in tmp_path.glob("held_*.json")]
    assert len(held) == 4
    for rank in held:
        assert rank["kept"] == rank["whole"] / 2
        checkpoint = rank["whole"] * (rank["rank"] == 0 and not rank["from_config"])
        limit = rank["kept"] + 2 * rank["largest"]
        assert limit < 0.7 * rank["whole"] and rank["peak"] - checkpoint < limit, rank
