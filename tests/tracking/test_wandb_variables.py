"""W&B's own environment variables are used, or named as ignored.
pytest tests/tracking/test_wandb_variables.py
"""

import pytest
from harness.inputs import read_config

wandb = pytest.importorskip("wandb")

from wandb import env

from zerotrain.runtime.errors import UserError
from zerotrain.tracking.destinations import is_wandb_off
from zerotrain.tracking.wandb import WandbSink, own_settings, stricter_mode

VALUES = ("7", "true", "must", "a-b", "http://127.0.0.1:1", "a" * 40)
LEFT_OUT = {
    "WANDB_MODE", "WANDB_SERVICE", "WANDB_SILENT", "WANDB_CONFIG_DIR", "WANDB_CONFIG_PATHS",
    "WANDB_SWEEP_ID", "WANDB_SWEEP_PARAM_PATH", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_X_EXECUTABLE",
    "WANDB_SAVE_CODE",
}  # fmt: skip
"""Set below, read from files, or overridden by other variables of the list."""


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path):
    """No variables or settings of the machine. W&B reads them once per process."""
    for name in ("WANDB_MODE", "WANDB_DISABLED"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "config"))
    wandb.teardown()
    yield
    wandb.teardown()


def settings_changed_by(name):
    """A value of a variable, and the settings that W&B makes of it, by their names."""
    for value in VALUES:
        before, after = wandb.Settings(), wandb.Settings()
        try:
            after.update_from_env_vars({name: value})
        except ValueError:
            continue
        changed = {k: v for k, v in vars(after).items() if v != vars(before)[k]}
        if changed:
            return value, changed
    return None, {}


def test_each_variable_of_wandb_is_used_or_named(tiny_config, tmp_path, monkeypatch, capsys):
    (tmp_path / "run").mkdir()
    names = {name for name in vars(env).values() if str(name).startswith("WANDB_")} - LEFT_OUT
    names |= {"WANDB_RUN_NAME", "WANDB_FINISH_TIMEOUT", "WANDB__TRANSACTION_LOG_FLUSH_INTERVAL"}
    found = {name: settings_changed_by(name) for name in sorted(names)}
    found = {name: pair for name, pair in found.items() if pair[1]}
    assert {"WANDB_ENTITY", "WANDB_PROJECT", "WANDB_RUN_ID", "WANDB_NOTES"} <= found.keys()
    for name, (value, _) in found.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("WANDB_MODE", "dryrun")
    sink = WandbSink(read_config(tiny_config(tracking__wandb="online")), "id")
    settings = sink.run.settings
    sink.close(0)
    assert settings.mode == "offline" and list((tmp_path / "run").glob("wandb/offline-run-*"))
    said = capsys.readouterr().out
    [line] = [line for line in said.splitlines() if " ignored: " in line]
    for name, (_, changed) in found.items():
        is_used = all(str(getattr(settings, key)) == str(value) for key, value in changed.items())
        assert is_used or f"{name}," in f"{line.split(' ignored')[0]},", (name, changed)
    assert "WANDB_MODE" not in line and "WANDB_PROJECT" in line and "WANDB_RUN_ID" in line


def test_the_stricter_of_recipe_and_environment_counts(tmp_path, monkeypatch):
    for mode, given, expected in (
        ("online", "dryrun", "offline"), ("online", "offline", "offline"),
        ("online", "disabled", "disabled"), ("offline", "run", "offline"),
        ("online", "shared", "online"), ("offline", "disabled", "disabled"),
    ):  # fmt: skip
        monkeypatch.setenv("WANDB_MODE", given)
        wandb.teardown()
        assert stricter_mode(mode, own_settings().mode) == expected
    monkeypatch.delenv("WANDB_MODE")
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "settings").write_text("[default]\nmode = offline\n")  # `wandb offline`
    wandb.teardown()
    assert stricter_mode("online", own_settings().mode) == "offline"


@pytest.mark.parametrize("name, value", [
    ("WANDB_MODE", "offlin"), ("WANDB_FORK_FROM", "a?_step=3"), ("WANDB_RESUME_FROM", "a?_step=3"),
])  # fmt: skip
def test_a_variable_that_no_run_can_follow_is_refused(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=f"^{name}: .*unset") as caught:
        own_settings()
    assert "\n" not in str(caught.value)
    monkeypatch.delenv(name)
    wandb.teardown()
    own_settings()


def test_wandb_disabled_is_read_as_trainer_reads_it(tiny_config, monkeypatch, capsys):
    online = read_config(tiny_config(tracking__wandb="online")).tracking
    for value, is_off in (
        ("yes", True), ("TRUE", True), ("1", True), ("on", True),
        ("", False), ("false", False), ("0", False), ("No", False),
    ):  # fmt: skip
        monkeypatch.setenv("WANDB_DISABLED", value)
        assert is_wandb_off(online) == is_off
        assert ("WANDB_DISABLED" in capsys.readouterr().out) == is_off
