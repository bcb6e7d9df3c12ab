"""scripts/scaling_test.py: how speed grows with nodes.    pytest tests/test_scaling.py"""

import json
import sys

import namespaces
import numpy as np
import pytest
from conftest import REPO, run

from runtime.errors import UserError
from scripts.scaling_test import (
    UNSPLIT,
    WARM_UP_STEPS,
    Measured,
    compare,
    measure,
    run_flags,
    sizes_of,
)
from tracking.history import Records, Window


def records(seconds, data=0.1, own=None, tokens=1000, steps=20):
    """Records of a run whose warm-up is 100 times as slow as its steps of `seconds`."""
    step = np.arange(1.0, WARM_UP_STEPS + steps + 1)
    slow = np.where(step <= WARM_UP_STEPS, 100, 1)
    train = {"step": step, "step_seconds": slow * seconds, "data_seconds": slow * data,
             "tokens": np.full(len(step), float(tokens))}  # fmt: skip
    scales = (100, 1, 1, 1, 1) if own else ()
    windows = [
        Window(5 * i, (), {"own_seconds": scale * np.array([own, own / 2, own / 2]),
                           "data_seconds": scale * np.array([0, 0, own / 4])})
        for i, scale in enumerate(scales, start=1)
    ]  # fmt: skip
    return Records(train, windows, {}, [])


def test_the_slowest_rank_is_measured_and_the_warm_up_is_not():
    found = measure(records(1.0, 0.1, own=0.4), nodes=2, ranks=3)
    assert found.tokens_per_s == pytest.approx(1000) and found.step_seconds == pytest.approx(1)
    assert (found.own_seconds, found.data_seconds) == pytest.approx((0.4, 0.1))
    assert measure(records(1.0, 0.2), 2, 3) == Measured(2, 3, 1000, 1.0, pytest.approx(0.2), None)


def test_what_grows_is_named_beyond_what_linear_scaling_has():
    one = Measured(1, 8, 8000, 1.0, data_seconds=0.0, own_seconds=0.3)
    for of_two, parts, grown in (
        ((12800, 1.25, 0.01, 0.3), (0.01, 1.0, 0.24), "communication +0.24 s"),
        ((10000, 1.6, 0.0, 0.45), (0.0, 1.5, 0.1), "compute +0.5 s"),  # a slow rank
        ((10000, 1.6, 0.6, 0.3), (0.6, 1.0, 0.0), "data +0.6 s"),
        ((16000, 1.0, 0.0, 0.36), (0.0, 1.0, 0.0), "-"),
    ):
        base, two = compare([one, Measured(2, 16, *of_two)], strong=False)
        assert base.efficiency == 1 and base.grown() == "-"
        assert two.efficiency == pytest.approx(of_two[0] / 16000)
        assert two.parts == pytest.approx(
            dict(zip(("data", "compute", "communication"), parts, strict=True))
        )
        assert two.grown() == grown and sum(two.parts.values()) == pytest.approx(of_two[1])

    half = Measured(2, 16, 12000, 2 / 3, data_seconds=0.0, own_seconds=0.15)
    strong = compare([one, half], strong=True)[1]
    assert strong.efficiency == 0.75 and strong.grown() == "communication +0.167 s"
    assert strong.growth["compute"] == pytest.approx(0)

    unsplit = Measured(2, 16, 12800, 1.25, 0.0, None)
    assert compare([one, unsplit], strong=False)[1].grown() == f"{UNSPLIT} +0.25 s"


def test_mistakes_are_one_line_before_anything_runs(tmp_path, tiny_config):
    assert sizes_of("4,1,2,2", 4) == [1, 2, 4]
    for text, message in (
        ("1,x", "--nodes: '1,x' is not a list of numbers like 1,2,4"),
        ("0", "is not a list of numbers"),
        ("2,3", "--nodes: 3 is more than the 2 hosts of the hostfile"),
    ):
        with pytest.raises(UserError) as refused:
            sizes_of(text, 2)
        assert message in str(refused.value)
    (tmp_path / "hostfile").write_text("a slots=1\nb slots=1\n")
    command = [
        sys.executable, "scripts/scaling_test.py", "--hostfile", tmp_path / "hostfile",
        "--nodes", "1,2", "--config", tiny_config(), "--output", tmp_path / "out",
    ]  # fmt: skip
    for more, message in (
        (["--steps", "3"], "error: --steps: 3 is less than 10"),
        (["--train.step", "3"], "train.step: unknown key; did you mean train.steps?"),
    ):
        finished = run([*command, *more])
        assert finished.code == 2 and message in finished.output, finished.output
        assert len(finished.output.splitlines()) == 1 and not (tmp_path / "out").exists()


def test_the_flags_make_any_config_a_short_run(tiny_config, tmp_path):
    from config.parse import parse_command_line

    file = str(tiny_config(checkpoint={"every_steps": 2, "resume": "auto"}, launch__world_size=9))
    asked = parse_command_line(["--config", file]).config
    flags = run_flags(asked, 48, 12, tmp_path / "run")
    config = parse_command_line(["--config", file, *flags]).config
    assert (config.train.steps, config.train.epochs, config.train.global_batch) == (12, None, 48)
    assert not config.data.eval_sources and config.checkpoint.resume == "none"
    assert config.checkpoint.every_steps == 0 and config.launch.world_size is None


WHY_NOT = namespaces.why_not()


@pytest.mark.launch
@pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))
def test_a_slow_link_shows_as_communication_and_a_failed_size_as_a_line(tmp_path, tiny_config):
    """Two hosts that send 10 Mbit/s, so that the gradients of a step, 0.2 MB, take 0.1 s and more;
    and a third one that does not exist.
    """
    hosts = namespaces.Hosts(tmp_path, 2).up()
    try:
        for i in (1, 2):
            namespaces.sh(
                f"ip netns exec {namespaces.TAG}{i} tc qdisc add dev eth0 root tbf rate 10mbit "
                "burst 32kbit latency 400ms"
            )
        (tmp_path / "hostfile").write_text("node-1 slots=1\nnode-2 slots=1\nnode-9 slots=1\n")
        finished = run([
            sys.executable, REPO / "scripts/scaling_test.py", "--hostfile", tmp_path / "hostfile",
            "--ssh_args", f"-F {hosts.ssh_config}", "--nodes", "1,2,3", "--steps", "20",
            "--output", tmp_path / "out", "--config", tiny_config(),
        ])  # fmt: skip
    finally:
        hosts.down()
    assert finished.code == 1, finished.output
    assert "3 nodes: exit code 2: error: node-9: " in finished.output, finished.output
    report = json.loads((tmp_path / "out" / "scaling.json").read_text())
    one, two = report["sizes"]
    assert (one["nodes"], two["nodes"], two["ranks"]) == (1, 2, 2)
    assert two["efficiency"] < 0.5 and "below 80%" in finished.output
    growth = two["growth_seconds"]
    assert growth["communication"] > max(0.1, 0.6 * sum(growth.values()))
    assert "communication +" in finished.output
    assert (tmp_path / "out" / "scaling.png").stat().st_size > 10_000
    assert not [*(tmp_path / "out").glob("*/checkpoints/step_*")]
