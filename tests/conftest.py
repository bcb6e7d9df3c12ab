"""Fixtures for all tests, and the order of their files."""

import gc

gc.disable()  # Imports make no garbage. Looking for it takes a fifth of their time.

import json
import os
import signal
from collections import Counter
from contextlib import suppress

import psutil
import pytest

pytest.register_assert_rewrite("harness", "namespaces")

from harness.forks import ForkServer
from harness.inputs import save_tiny_llama, write_tiny_config
from harness.repository import REPO, SAMPLE
from harness.runs import plainly

# A shell makes background jobs ignore Ctrl-C. The runs of the tests would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ["STARTED_BY"] = str(os.getpid())
os.environ["OMP_WAIT_POLICY"] = "passive"  # or waiting threads would occupy cores
SECONDS = "zerotrain/seconds"
"""The key of pytest's cache for the seconds of each test's last run."""
measured = Counter()


def pytest_collection_modifyitems(config, items):
    """Mark tests with forked ranks as launch tests, and start the slowest files first.

    So no worker is left with a slow file at the end. A test that has never run counts a tenth of
    its own time limit, 10 s if it is a launch test, or else 0.1 s.
    """
    gc.freeze()  # Collections pass over what was imported.
    gc.enable()
    last, total = config.cache.get(SECONDS, {}), Counter()
    for item in items:
        if "forks" in item.fixturenames:
            item.add_marker("launch")
        limit = item.get_closest_marker("timeout")
        guess = limit.args[0] / 10 if limit else 10 if item.get_closest_marker("launch") else 0.1
        total[item.path] += last.get(item.nodeid, guess)
    items.sort(key=lambda item: -total[item.path])


def pytest_runtest_logreport(report):
    measured[report.nodeid] += report.duration


def pytest_sessionfinish(session):
    if not hasattr(session.config, "workerinput"):  # xdist's workers report to this process
        session.config.cache.set(SECONDS, session.config.cache.get(SECONDS, {}) | measured)


@pytest.fixture(scope="session")
def forks(tmp_path_factory):
    server = ForkServer(tmp_path_factory.mktemp("forks"))
    yield server
    server.close()


@pytest.fixture
def left_running(forks):
    """Returns the running processes that the test has started. They are found by their initial
    environment, whatever their names and parents are now.
    """

    def running():
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                is_ours = process.environ().get("STARTED_BY") == os.environ["STARTED_BY"]
                if is_ours and process.status() != psutil.STATUS_ZOMBIE and process not in before:
                    found.append(process)
        return found

    before = []
    before = running()  # includes the fork server
    yield running
    for process in running():  # a failed test leaves some
        with suppress(psutil.NoSuchProcess):
            process.kill()


@pytest.fixture(scope="session")
def sample_tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(SAMPLE / "model")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory, sample_tokenizer):
    """A folder with a tokenizer and a Llama of 2 layers with tied embeddings, without dropout."""
    return save_tiny_llama(tmp_path_factory.mktemp("tiny_model"), sample_tokenizer)


@pytest.fixture(scope="session")
def tiny_model_with_dropout(tmp_path_factory, sample_tokenizer):
    return save_tiny_llama(tmp_path_factory.mktemp("dropout"), sample_tokenizer, dropout=0.2)


@pytest.fixture(scope="session")
def chat_rows():
    """70 chats about additions, 30 to 220 tokens each."""
    return [json.loads(row) for row in (REPO / "tests/harness/rows.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def plain_once(sample_tokenizer):
    """Runs `plainly` for the first config of a module with a key, and returns that result from
    then on.
    """
    found = {}

    def run(config, *prepare, key=None):
        if key not in found:
            found[key] = plainly(config, sample_tokenizer, *prepare)
        return found[key]

    return run


@pytest.fixture
def tiny_config(tmp_path, tiny_model, chat_rows):
    """Calls write_tiny_config in the folder of the test."""

    def write(name="config.yaml", model=tiny_model, **changes):
        return write_tiny_config(tmp_path, chat_rows, model, name, **changes)

    return write
