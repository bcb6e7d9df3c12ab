"""scripts/prove.py golden.    pytest tests/tools/test_golden.py"""

import json
import sys
from pathlib import Path

import pytest

import zerotrain.tools.golden
from scripts import prove
from zerotrain.config.parse import dump_config
from zerotrain.runtime.errors import UserError
from zerotrain.tools.golden import GOLDEN, TOLERANCES, compare, store
from zerotrain.tools.local_ranks import Ended


def test_losses_are_as_stored_and_what_has_moved_is_named(forks, monkeypatch, capsys, tmp_path):
    """The copies train once, on forked ranks. Then other files are compared with their losses."""
    trained = {}

    def start(config, ranks):
        file = Path(f"{config.output_dir}.yaml")
        file.write_text(dump_config(config))
        finished = forks.train(file, ranks=ranks)
        return Ended(finished.code, finished.output)

    def keep(losses):
        trained.update(losses)
        return compare(losses)

    monkeypatch.setattr(zerotrain.tools.golden, "start_training", start)
    monkeypatch.setattr(zerotrain.tools.golden, "compare", keep)
    for name in ("DS_ACCELERATOR", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "")  # The command sets them.
    command = ["prove.py", "golden", "--work", str(tmp_path / "work")]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as ended:
        prove.main()
    out = capsys.readouterr().out
    assert ended.value.code == 0 and out.count("as stored") == 2 * len(TOLERANCES), out

    other = tmp_path / "golden.json"
    monkeypatch.setattr(zerotrain.tools.golden, "GOLDEN", other)
    values = json.loads(GOLDEN.read_text())
    values["losses"]["olmo-3-7b"]["fp32"][7] *= 1 + 3e-6
    values["versions"]["peft"] = "0.1"
    other.write_text(json.dumps(values))
    assert not compare(trained)
    *lines, versions = capsys.readouterr().out.splitlines()
    [moved] = [line for line in lines if "MOVED" in line]
    assert "olmo-3-7b" in moved and "fp32" in moved and "step 8;" in moved
    assert "peft 0.1 -> " in versions and versions.count("->") == 1
    store(trained)
    assert compare(trained) and "0.0e+00" in capsys.readouterr().out
    values = json.loads(other.read_text())
    for losses in values["losses"].values():
        losses["bf16"][3] *= 1 + 4e-3  # as an upgrade may move them
    other.write_text(json.dumps(values))
    assert not compare(trained) and capsys.readouterr().out.count("MOVED") == len(TOLERANCES)

    monkeypatch.setattr(sys, "argv", [*command, "--train.steps", "1"])
    with pytest.raises(UserError, match="leave out"):
        prove.main()
