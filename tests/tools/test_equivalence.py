"""scripts/prove.py equivalence.    pytest tests/tools/test_equivalence.py"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from harness.inputs import read_config, strategy
from harness.repository import REPO
from harness.runs import read_metrics
from transformers import AutoConfig

import zerotrain.tools.equivalence
from zerotrain.config.parse import dump_config
from zerotrain.model.architecture import meta_model
from zerotrain.runtime.errors import UserError
from zerotrain.tools.equivalence import small_config, start_training
from zerotrain.tools.local_ranks import Ended, run_local_ranks

sys.path.insert(0, str(REPO / "scripts"))
import prove


@pytest.fixture
def command(forks, monkeypatch, capsys):
    """prove.py with forked ranks: (exit code, what it prints)."""

    def start(config, ranks):
        file = Path(f"{config.output_dir}.yaml")
        file.write_text(dump_config(config))
        finished = forks.train(file, ranks=ranks)
        return Ended(finished.code, finished.output, 1.0)

    def run(claim, config, *argv):
        argv = ["prove.py", claim, "--config", config, *argv]
        monkeypatch.setattr(sys, "argv", list(map(str, argv)))
        with pytest.raises(SystemExit) as ended:
            prove.main()
        return ended.value.code, capsys.readouterr().out

    monkeypatch.setattr(zerotrain.tools.equivalence, "start_training", start)
    return run


def test_a_small_copy_equals_plain_torch_and_another_update_does_not(
    command, tiny_config, tmp_path, tiny_model_with_dropout
):
    config = tiny_config(model=tiny_model_with_dropout, model__lora={"r": 4, "dropout": 0.1})
    l2_decay = strategy(tmp_path, "zero1", adam_w_mode=False)
    content = json.loads(l2_decay.read_text())
    content["optimizer"]["type"] = "Adam"
    l2_decay.write_text(json.dumps(content))
    flags = ["--work", tmp_path / "work", "--ds_configs"]
    files = ["ds_configs/zero3.json", "ds_configs/deepcompile.json"]
    code, out = command("equivalence", config, *flags, *files)
    assert code == 0 and out.endswith("\nproved\n"), out
    lines = [line for line in out.splitlines() if " ranks " in line]
    for line, verdict in zip(lines, ["equal"] * 4 + ["compile.deepcompile"], strict=True):
        assert verdict in line, out
    rows = [line.split() for line in lines[:4]]
    cases = [("bucketed,", "2"), ("bucketed,", "1"), ("packed,", "2"), ("packed,", "1")]
    assert [tuple(row[1:3]) for row in rows] == cases
    for _, _, ranks, _, *numbers, _ in rows:
        assert (numbers[0] == "1") == (ranks == "2"), "micro-steps"
        assert max(map(float, numbers[-3:])) < 2e-6, "a fifth of the tolerance"
    code, out = command("equivalence", config, "--ranks", 1, *flags, l2_decay)
    assert code == 1 and out.count("  REFUTED\n") == 2, out


def test_rounding_to_bf16_is_within_its_tolerance(command, tiny_config, tmp_path):
    flags = ["--work", tmp_path / "work", "--precision", "bf16", "--ranks", 1]
    code, out = command(
        "equivalence", tiny_config(), *flags, "--ds_configs", "ds_configs/zero2.json"
    )
    assert code == 0 and out.count("  equal\n") == 2 and out.endswith("\nproved\n"), out


def test_what_cannot_run_proves_nothing(command, tiny_config, tmp_path, monkeypatch):
    """On forked ranks, and with the launcher."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    config = tiny_config(ds_config="ds_configs/deepcompile.json")
    flags = [
        "--work",
        tmp_path / "work",
        "--ranks",
        1,
        "--ds_configs",
        "ds_configs/deepcompile.json",
    ]
    with pytest.raises(UserError, match="nothing could be run"):
        command("equivalence", config, *flags)
    config = read_config(config)
    code, output, gib = start_training(config, 1)
    assert code == 2 and 0.1 < gib < 10, output
    assert "error: " in output == Path(f"{config.output_dir}.log").read_text()
    train = replace(config.train, epochs=None, steps=2)
    code, output, _ = start_training(
        replace(config, ds_config="ds_configs/zero1.json", train=train), 2
    )
    assert code == 0 and len(read_metrics(config.output_dir)) == 2, output


def test_the_code_of_the_rank_that_failed_first_counts_and_none_waits_for_it(tmp_path, monkeypatch):
    monkeypatch.setattr(zerotrain.tools.local_ranks, "SECONDS_AFTER_A_FAILURE", 0.1)
    script = "import os, sys, time; sys.exit(3) if os.environ['RANK'] > '0' else time.sleep(600)"
    ended = run_local_ranks(3, ["-c", script], tmp_path / "log")
    assert ended.code == 3 and 0 < ended.peak_gib < 1


SHAPES = json.loads((REPO / "recipes" / "shapes.json").read_text())


@pytest.mark.parametrize("name", [name for name in SHAPES if "/" in name])
def test_every_recipe_has_a_small_copy(name):
    whole = AutoConfig.for_model(**SHAPES[name])
    kinds = set(getattr(whole.get_text_config(), "layer_types", None) or [])
    model = meta_model(small_config(whole), trust_remote_code=False)
    text = model.config.get_text_config()
    assert set(getattr(text, "layer_types", None) or []) == kinds
    weights = sum(p.numel() for p in model.parameters())
    assert weights < 3 * 32 * text.vocab_size, weights
