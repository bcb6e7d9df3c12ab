"""train.py in real processes equals a plain torch loop.
pytest tests/training/test_training.py"""

import json
import shutil
import signal
import socket
import time
from itertools import chain

import numpy as np
import pytest
from harness.forks import SMALL_CHUNKS
from harness.inputs import read_config, save_tiny_llama, strategy, weighted, write_rows
from harness.repository import REPO
from harness.runs import (
    assert_same,
    assert_same_weights,
    checkpoints,
    determined,
    export,
    plainly,
    read_metrics,
    stop_after_one_step,
)
from transformers import AutoModelForCausalLM

from zerotrain.checkpoint.run_folder import shard_name
from zerotrain.checkpoint.shards import read_shard
from zerotrain.data.caches import open_caches
from zerotrain.tools.open_plans import open_plans
from zerotrain.tools.plain_loop import mean_loss, read_rows


@pytest.fixture(scope="module")
def large_vocabulary(tmp_path_factory, sample_tokenizer):
    folder = tmp_path_factory.mktemp("large_vocabulary")
    return save_tiny_llama(folder, sample_tokenizer, vocab_size=8192, hidden_size=128)


# Strategy, ranks, tokens of a micro-batch, batching, activation checkpointing, weights.
LAYOUTS = [
    ("zero0", 1, 1024, "bucketed", False, False),
    ("zero1", 2, 300, "packed", False, False),
    ("zero2", 2, 300, "bucketed", False, True),
    ("zero3", 2, 300, "packed", True, True),
    ("zero2_offload", 2, 300, "packed", False, False),
    ("zero3_offload", 3, 300, "packed", False, True),
    ("zero2, shared sequences", 2, 300, "bucketed", False, False),
    ("ulysses", 4, 300, "packed", True, True),
]


@pytest.mark.parametrize("name, ranks, budget, batching, recompute, has_weights", LAYOUTS)
def test_equals_a_plain_loop(
    forks, tiny_config, tmp_path, chat_rows, plain_once, name, ranks, budget, batching,
    recompute, has_weights,
):  # fmt: skip
    """Two steps of warm-up, and six of which the last is in the second epoch. DeepSpeed's CPU Adam
    is used if g++ can compile it (10 s, once), otherwise torch's. The held-out set takes several
    steps.
    """
    ds_config = f"ds_configs/{name}.json"
    if name == "zero2, shared sequences":
        ds_config = strategy(tmp_path, "zero2", {"sequence_parallel_size": 2})
    elif shutil.which("g++") is None:
        ds_config = strategy(tmp_path, name)
    rows = weighted(chat_rows) if has_weights else chat_rows
    config = tiny_config(
        data__micro_batch_tokens=budget, data__batching=batching,
        model__activation_checkpointing=recompute, ds_config=ds_config,
        data__train_sources=[
            write_rows(tmp_path / "math.jsonl", rows[:40]),
            {
                "path": write_rows(tmp_path / "chat.jsonl", rows[40:]),
                "loss_weight": 0.3 if has_weights else 1,
            },
        ],
        data__eval_sources=[write_rows(tmp_path / "three_steps.jsonl", rows[:30])],
        train__steps=8, eval__every_steps=100, eval__generate=3, eval__max_new_tokens=4,
        train__replay_every=2 if recompute else None,
    )  # fmt: skip
    plain = plain_once(config, key=has_weights)
    forks.finish(config, ranks=ranks, patches=SMALL_CHUNKS, CXX=f"{REPO}/tests/harness/g++")

    assert_same(tmp_path / "run", plain)
    assert len(read_metrics(tmp_path / "run", "eval")) == 2
    steps = read_metrics(tmp_path / "run")
    if name == "zero2":
        micro_steps = {step["micro_steps"] for step in steps}
        assert 1 < min(micro_steps) < max(micro_steps)
    if batching == "packed":
        assert all(step["padding_efficiency"] == 1 for step in steps)
    np.testing.assert_allclose([s["lr"] for s in steps], plain.learning_rates, rtol=1e-9)
    assert_same_weights(export(tmp_path / "run", tmp_path / "hf"), plain)
    assert_source_losses(read_config(config), steps)


def assert_source_losses(config, steps):
    """In the first step they equal the untrained model's, in all steps their mean is the loss."""
    plan = open_plans(config, 1)[-2]
    found = [[step["source_loss/math"], step["source_loss/chat"]] for step in steps]
    for k, (losses, step) in enumerate(zip(found, steps, strict=True)):
        mean = np.average(losses, weights=plan.step(k).weights)
        assert mean == pytest.approx(step["loss"], rel=1e-6)
    model = AutoModelForCausalLM.from_pretrained(config.model.name_or_path)
    rows, chosen = read_rows(plan.data), np.concatenate([*chain(*plan.step(0).micro_batches)])
    parts = ([rows[i] for i in chosen if (i < 40) == is_math] for is_math in (True, False))
    np.testing.assert_allclose(found[0], [mean_loss(model, p) for p in parts], rtol=1e-5)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_norm_and_clipping_are_exact_for_a_million_weights(
    forks, tiny_config, tmp_path, sample_tokenizer, large_vocabulary, stage
):
    """An fp32 sum over the gradient of such a vocabulary would be off by 5e-5. DeepSpeed can divide
    gradients before it sums them, at stage 1 if it does not scatter them.
    """
    early = {"prescale_gradients": True, "zero_optimization.reduce_scatter": False}
    config = tiny_config(
        model=large_vocabulary, data__micro_batch_tokens=4096,
        train__steps=2, ds_config=strategy(tmp_path, f"zero{stage}", early if stage < 2 else {}),
    )  # fmt: skip
    forks.finish(config, ranks=2)
    plain = plainly(config, sample_tokenizer)
    assert min(plain.grad_norms) > 0.5  # so the gradient is clipped
    assert_same(tmp_path / "run", plain)
    assert_same_weights(export(tmp_path / "run", tmp_path / "hf"), plain)


# bf16 has 8 bits of mantissa, 0.4%, fp16 11. The loss averages over hundreds of tokens.
@pytest.mark.parametrize(
    "precision, name, loss_error, norm_error",
    [
        ("bf16", "zero0", 5e-3, 5e-2),
        ("bf16", "zero1", 5e-3, 5e-2),
        ("bf16", "zero3_offload", 5e-3, 5e-2),
        ("fp16", "zero2", 1e-3, 1e-2),
    ],
)
def test_16_bits_follow_the_fp32_curve_and_resume_bit_for_bit(
    forks, tiny_config, tmp_path, plain_once, precision, name, loss_error, norm_error
):
    """Four optimizer wrappers of DeepSpeed. fp16 at stage 0 is refused: test_config.py."""
    # With 16 or more it would skip the first updates.
    changes = {"fp16.initial_scale_power": 8}
    if "offload" in name and shutil.which("g++"):  # the shipped file's own CPU Adam
        changes["optimizer.params.torch_adam"] = False
    ds_config = strategy(tmp_path, name, changes)
    config = tiny_config(
        data__micro_batch_tokens=300, train__steps=8, train__precision=precision,
        ds_config=ds_config,
    )  # fmt: skip
    plain = plain_once(config)
    # torch computes in fp16 on any CPU, but DeepSpeed allows it on few
    accelerator = "deepspeed.accelerator.cpu_accelerator.CPU_Accelerator"
    allowed = {f"{accelerator}.is_fp16_supported": "lambda self: True"}
    compiler = f"{REPO}/tests/harness/g++"
    forks.finish(config, ranks=2, patches=allowed, CXX=compiler)
    steps = read_metrics(tmp_path / "run")
    assert not any(s["update_skipped"] for s in steps)
    np.testing.assert_allclose([s["loss"] for s in steps], plain.losses, rtol=loss_error)
    np.testing.assert_allclose([s["grad_norm"] for s in steps], plain.grad_norms, rtol=norm_error)

    cut = tmp_path / "cut"
    stop_after_one_step(cut)
    flags = ["--output_dir", cut, "--train.replay_every", 1]  # which changes nothing
    for power in (8, 4):  # A checkpoint has its own loss scale.
        strategy(tmp_path, name, changes | {"fp16.initial_scale_power": power})
        finished = forks.finish(config, *flags, ranks=2, patches=allowed, CXX=compiler)
    assert "resuming from" in finished.output
    assert determined(cut) == determined(tmp_path / "run")
    last = (checkpoints(folder)[-1] for folder in (tmp_path / "run", cut))
    one, other = (read_shard(path, shard_name(1)) for path in last)
    assert one.updates == other.updates == 8, "none before the first step"
    assert one.loss_scaler == other.loss_scaler
    assert bool(one.loss_scaler) == (precision == "fp16")


# --------------------------------------------------------------------------------------------------
# Stop, resume


@pytest.mark.parametrize("stage, how", [(0, "killed"), (3, "preempted")])
def test_stopped_and_resumed_equals_uninterrupted_bit_for_bit(
    forks, tiny_config, tmp_path, chat_rows, tiny_model_with_dropout, sample_tokenizer, stage, how
):
    """A run is killed between two checkpoints, or one of two ranks is preempted and both save. The
    killed one is stopped by a flipped bit, too. It replays micro-batches, which changes nothing.
    """
    config = tiny_config(
        data__train_sources=[write_rows(tmp_path / "weighted.jsonl", weighted(chat_rows))],
        model=tiny_model_with_dropout,
        ds_config=f"ds_configs/zero{stage}.json",
        train__steps=24, eval__every_steps=7,
        checkpoint={"every_steps": 5, "keep_last": 2},
    )  # fmt: skip
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    forks.finish(config, "--output_dir", whole, ranks=2)

    process = forks.start(config, "--output_dir", cut, ranks=2)
    process.until((cut / "checkpoints" / "step_00000010").exists)
    process.kill(1, signal.SIGUSR1 if how == "preempted" else signal.SIGKILL)
    if how == "killed":
        process.kill(0)
    assert process.wait().code != 0
    done = read_metrics(cut)[-1]["step"]
    assert 10 <= done < 24
    flags = ["--output_dir", cut, "--train.replay_every", 2]
    if how == "preempted":
        assert checkpoints(cut)[-1].name == f"step_{done:08d}"
    else:
        flipped = forks.train(config, *flags, ranks=2, module="flipped_bit", code=1)
        assert f" on rank 1 @ {socket.gethostname()}; " in flipped.error
        assert "Traceback" not in flipped.output
        assert read_metrics(cut)[-1]["step"] == 21

    finished = forks.finish(config, *flags, ranks=2)
    assert "resuming from" in finished.output
    lines = [determined(folder) for folder in (whole, cut)]
    assert lines[0] == lines[1] and len(lines[0]) == 24
    evals = [[e["eval_loss"] for e in read_metrics(f, "eval")] for f in (whole, cut)]
    assert evals[0] == evals[1] and len(evals[0]) == 1 + 3 + 1
    held_out = read_rows(open_caches(read_config(config), sample_tokenizer)[1])
    model = AutoModelForCausalLM.from_pretrained(tiny_model_with_dropout)  # in evaluation mode
    assert evals[0][0] == pytest.approx(mean_loss(model, held_out), rel=1e-5)

    exported = [export(f, tmp_path / f"hf_{f.name}") / "model.safetensors" for f in (whole, cut)]
    assert exported[0].read_bytes() == exported[1].read_bytes()
    *_resumed_from, old, new = (c.name for c in checkpoints(cut))
    assert (old, new) == ("step_00000020", "step_00000024") and len(_resumed_from) < 2

    again = forks.finish(config, "--output_dir", cut, ranks=2)
    assert "finished: step 24" in again.output


def test_ranks_that_hang_are_named_at_the_timeout(forks, tiny_config, tmp_path):
    """Rank 1 calls a C function that never returns and keeps Python's lock. Rank 2 is stopped. When
    rank 1 then crashes, its stack is printed, too.
    """
    config = tiny_config(train__steps=5000, distributed={"timeout_seconds": 8})
    hung = tmp_path / "hung"
    in_c = (
        f"lambda norms, times: len(norms) == 3 and __import__('os').environ['RANK'] == '1' "
        f"and open('{hung}', 'w') and __import__('ctypes').PyDLL('libc.so.6').sleep(1000) or 1e9"
    )
    run = forks.start(config, ranks=3, patches={"train.spike_limit": in_c})
    run.until(hung.exists)
    began = time.monotonic()
    run.kill(2, signal.SIGSTOP)
    run.until(lambda: "Timed out" in run.log.read_text())  # gloo's own time-out is 30 minutes
    assert time.monotonic() - began < 60
    assert [*(tmp_path / "run").glob("collectives_*")] == [tmp_path / "run" / "collectives_0"]
    run.kill(1, signal.SIGABRT)
    run.kill(2)
    assert run.wait().code != 0
    output, host = run.log.read_text(), socket.gethostname()
    assert f'[rank 1 @ {host}]   File "<string>", line 1 in <lambda>' in output
    assert f"[rank 1 @ {host}] Fatal Python error: Aborted" in output


def test_zero3_loads_partitioned(forks, tiny_config, tmp_path, sample_tokenizer):
    """No rank holds more than its own partitions and two copies of one parameter, with pretrained
    and with random weights. The first rank also reads the checkpoint.
    """
    model = save_tiny_llama(tmp_path / "model", sample_tokenizer, num_hidden_layers=12)
    config = tiny_config(model=model, ds_config="ds_configs/zero3.json")
    forks.finish(config, ranks=2, module="load_peak")
    held = [json.loads(path.read_text()) for path in tmp_path.glob("held_*.json")]
    assert len(held) == 4
    for rank in held:
        assert rank["kept"] == rank["whole"] / 2
        checkpoint = rank["whole"] * (rank["rank"] == 0 and not rank["from_config"])
        limit = rank["kept"] + 2 * rank["largest"]
        assert limit < 0.7 * rank["whole"] and rank["peak"] - checkpoint < limit, rank
