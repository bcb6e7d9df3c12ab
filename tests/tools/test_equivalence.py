"""scripts/prove.py equivalence.    pytest tests/tools/test_equivalence.py"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from harness.inputs import SMALL_SIZES, read_config, strategy
from harness.runs import read_metrics
from transformers import AutoModelForCausalLM, MixtralConfig, Qwen3_5TextConfig

import zerotrain.tools.equivalence
from zerotrain.config.parse import dump_config
from zerotrain.runtime.errors import UserError
from zerotrain.tools.equivalence import start_training
from zerotrain.tools.local_ranks import Ended, run_local_ranks


@pytest.fixture
def equivalence(forks, prove, monkeypatch, tmp_path):
    """Runs prove.py equivalence with forked ranks: (exit code, what it prints)."""

    def start(config, ranks):
        file = Path(f"{config.output_dir}.yaml")
        file.write_text(dump_config(config))
        finished = forks.train(file, ranks=ranks)
        return Ended(finished.code, finished.output)

    monkeypatch.setattr(zerotrain.tools.equivalence, "start_training", start)
    return lambda config, *flags: prove("equivalence", config, "--work", tmp_path / "work", *flags)


def test_a_small_copy_equals_plain_torch_and_another_update_does_not(
    equivalence, tiny_config, tmp_path, tiny_model_with_dropout
):
    config = tiny_config(model=tiny_model_with_dropout, model__lora={"r": 4, "dropout": 0.1})
    changes = {"optimizer.type": "Adam", "optimizer.params.adam_w_mode": False}
    l2_decay = strategy(tmp_path, "zero1", changes)
    quantized = strategy(tmp_path, "zeropp", {"zero_optimization.zero_quantized_weights": True})
    files = [f"ds_configs/zero{stage}.json" for stage in (0, 3)]
    code, out = equivalence(config, "--ds_configs", *files, quantized)
    assert code == 0 and out.endswith("\nproved\n"), out
    lines = [line for line in out.splitlines() if " ranks " in line]
    for line, verdict in zip(lines, ["equal"] * 8 + ["zero_quantized_weights"], strict=True):
        assert verdict in line, out
    rows = [line.split() for line in lines[:8]]
    cases = [("bucketed,", "2"), ("bucketed,", "1"), ("packed,", "2"), ("packed,", "1")]
    assert [tuple(row[1:3]) for row in rows] == cases * 2
    for _, _, ranks, _, *numbers, _ in rows:
        assert (numbers[0] == "1") == (ranks == "2"), "micro-steps"
        assert max(map(float, numbers[-3:])) < 2e-6, "a fifth of the tolerance"
    code, out = equivalence(
        config, "--ranks", 1, "--ds_configs", l2_decay, "--work", tmp_path / "another"
    )
    assert code == 1 and out.count("  REFUTED\n") == 2, out


def test_a_hybrid_equals_plain_torch_at_zero3(equivalence, tiny_config, tmp_path, sample_tokenizer):
    """Two ranks have different numbers of examples, and blocks are computed twice."""
    torch.manual_seed(0)
    hybrid = Qwen3_5TextConfig(
        **SMALL_SIZES, head_dim=8, layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8,
        linear_value_head_dim=8, eos_token_id=sample_tokenizer.eos_token_id,
        pad_token_id=sample_tokenizer.pad_token_id,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(hybrid).save_pretrained(tmp_path / "hybrid")
    sample_tokenizer.save_pretrained(tmp_path / "hybrid")
    # With the rows of seed 7 rounding grows to the tolerance on CPUs without AVX-512.
    config = tiny_config(
        model=tmp_path / "hybrid", model__activation_checkpointing=True, train__seed=11
    )
    code, out = equivalence(config, "--ds_configs", "ds_configs/zero3.json")
    assert code == 0 and out.count("  equal\n") == 4 and out.count(", packed,") == 2, out


def test_a_mixture_with_a_router_loss_equals_plain_torch(
    equivalence, tiny_config, tmp_path, sample_tokenizer
):
    """One rank has several micro-steps."""
    torch.manual_seed(0)
    mixture = MixtralConfig(
        **SMALL_SIZES, num_local_experts=8, output_router_logits=True, router_aux_loss_coef=0.3,
        eos_token_id=sample_tokenizer.eos_token_id, pad_token_id=sample_tokenizer.pad_token_id,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(mixture).save_pretrained(tmp_path / "mixture")
    sample_tokenizer.save_pretrained(tmp_path / "mixture")
    config = tiny_config(model=tmp_path / "mixture")
    code, out = equivalence(config, "--ds_configs", "ds_configs/zero2.json")
    assert code == 0 and out.count("  equal\n") == 4, out
    assert "router loss" in out.splitlines()[0], out


def test_rounding_to_bf16_is_within_its_tolerance(equivalence, tiny_config):
    flags = ["--precision", "bf16", "--ranks", 1, "--ds_configs", "ds_configs/zero2.json"]
    code, out = equivalence(tiny_config(), *flags)
    assert code == 0 and out.count("  equal\n") == 2 and out.endswith("\nproved\n"), out


def test_what_cannot_run_proves_nothing(forks, equivalence, tiny_config, tmp_path, monkeypatch):
    """On forked ranks, and on real ones."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    file = strategy(tmp_path, "zero0", {"compile.deepcompile": True})
    config = tiny_config(ds_config=file)
    with pytest.raises(UserError, match="nothing could be run"):
        equivalence(config, "--ranks", 1, "--ds_configs", file)
    forks.make_cache(config)
    config = read_config(config)
    code, output = start_training(replace(config, ds_config="none.json"), 1)
    assert code == 2 and "error: " in output == Path(f"{config.output_dir}.log").read_text()
    train = replace(config.train, epochs=None, steps=2)
    code, output = start_training(
        replace(config, ds_config="ds_configs/zero1.json", train=train), 2
    )
    assert code == 0 and len(read_metrics(config.output_dir)) == 2, output


def test_the_code_of_the_rank_that_failed_first_counts_and_none_waits_for_it(tmp_path, monkeypatch):
    monkeypatch.setattr(zerotrain.tools.local_ranks, "SECONDS_AFTER_A_FAILURE", 0.1)
    script = "import os, sys, time; sys.exit(3) if os.environ['RANK'] > '0' else time.sleep(600)"
    ended = run_local_ranks(3, ["-c", script], tmp_path / "log")
    assert ended.code == 3
