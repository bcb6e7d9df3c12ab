"""Fixtures of the tools' tests."""

import sys

import pytest

from scripts import prove as script


@pytest.fixture
def prove(monkeypatch, capsys):
    """Runs scripts/prove.py in this process: (exit code, what it prints)."""

    def run(claim, config, *flags):
        argv = ["prove.py", claim, "--config", config, *flags]
        monkeypatch.setattr(sys, "argv", [str(word) for word in argv])
        with pytest.raises(SystemExit) as ended:
            script.main()
        return ended.value.code, capsys.readouterr().out

    return run
