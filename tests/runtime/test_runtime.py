"""Errors, random numbers and the process group.    pytest tests/runtime/test_runtime.py"""

import socket
import sys
import time
from itertools import product

import pytest
import torch
from harness.processes import free_port, run

from zerotrain.runtime.errors import EnvironmentFailure, UserError
from zerotrain.runtime.process_group import check_devices
from zerotrain.runtime.progress import show_rows
from zerotrain.runtime.seeding import rank_seed, rng_state, set_rng_state


@pytest.mark.parametrize("line, place, key", [
    ("runs/a.yaml:3: train.seed: not a number", "runs/a.yaml:3", "train.seed"),
    ("error: command line: --bf16: unknown", "command line", "--bf16"),
    ("error: [rank 3 @ host] ds.json: fp16.enabled: false", "ds.json", "fp16.enabled"),
    ("train.steps: too many: 5", None, "train.steps"),
    ("/rows/a b.jsonl is empty: why", None, None),
])  # fmt: skip
def test_an_error_knows_the_place_and_the_key_that_its_message_names(line, place, key):
    error = UserError(line)
    assert (error.place, error.key) == (place, key)


def test_what_a_stranger_may_have_named_is_short_and_printable(capsys):
    """The end of a message says what to do."""
    text = str(UserError(f"a.json: {'x' * 10**6}: unknown; remove it"))
    assert text.startswith("a.json: xxx") and text.endswith("; remove it") and len(text) == 2000
    show_rows({"rejected \x1b]0;title\x07": "a\x1b[2J"})
    assert "\x1b" not in capsys.readouterr().out


def test_a_reader_that_ends_early_is_no_traceback():
    program = (
        "from zerotrain.runtime.errors import exit_on_error; "
        "exit_on_error(lambda: [print(i) for i in range(10**6)])"
    )
    piped = run(["bash", "-c", f"{sys.executable} -c '{program}' | head -1"])
    assert piped.output == "0\n"


def test_a_rank_that_fails_alone_does_not_wait_for_the_others(forks, tiny_config):
    """NCCL's shutdown would wait until the timeout, and print the traceback only then."""
    began = time.monotonic()
    options = {"ranks": 2, "module": "nccl_shutdown"}
    alone = forks.train(tiny_config(), FAILS="alone", code=1, **options)
    assert "ValueError: on this one" in alone.output
    assert time.monotonic() - began < 50
    assert forks.refusal(tiny_config(), FAILS="together", **options) == "error: on all ranks"
    assert "no room" in forks.train(tiny_config(), FAILS="disk", code=1, **options).error


def test_a_rank_without_a_gpu_is_one_line():
    check_devices(0, visible=1)
    with pytest.raises(EnvironmentFailure, match=r"LOCAL_RANK is 1, but the rank sees 1 GPUs"):
        check_devices(1, visible=1)


def test_each_seed_rank_and_step_has_random_numbers_of_its_own():
    seeds = {rank_seed(*which) for which in product(range(9), repeat=3)}
    assert len(seeds) == 9**3 and max(seeds) > 2**60


def test_random_numbers_continue_unless_the_state_has_another_shape_or_device():
    state = rng_state()
    first = torch.rand(9)
    for changed in ({}, {"torch": 1}, {"torch": torch.ones(3)}, {"cuda": torch.get_rng_state()}):
        set_rng_state(state | changed)
        assert torch.equal(torch.rand(9), first) == (not changed)
    set_rng_state({})


@pytest.mark.parametrize("taken", [True, False])
def test_a_rendezvous_that_fails_exits_with_1(forks, tiny_config, taken):
    """The port is busy, or the first rank does not come. A launcher may start the run again."""
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        finished = forks.train(
            tiny_config(), "--distributed.timeout_seconds", 3, code=1,
            RANK="0" if taken else "1", WORLD_SIZE="2",
            MASTER_PORT=str(busy.getsockname()[1]) if taken else free_port(),
        )  # fmt: skip
    assert "SLURM_NTASKS is 2" in finished.output and "MASTER_ADDR" in finished.output
    assert "; if another run uses the port, set a different --master_port" in finished.output
    forks.finish(tiny_config(), "--dry_run", ranks=2)  # on another port


def test_a_shell_of_slurm_is_one_rank_or_names_the_ranks_that_it_waits_for(forks, tiny_config):
    """`salloc` opens a shell of one rank. In `srun --pty --ntasks 16`, nobody starts the others."""
    shell = {"RANK": "", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "16"}
    forks.finish(tiny_config(), "--dry_run", SLURM_STEP_NUM_TASKS="1", **shell)
    soon = {"zerotrain.runtime.process_group.QUIET_SECONDS": "1"}
    waiting = forks.start(tiny_config(), patches=soon, SLURM_STEP_NUM_TASKS="16", **shell)
    waiting.until(lambda: "SLURM_NTASKS is 16" in waiting.log.read_text())
    waiting.kill(0)
    waiting.wait(-9)
