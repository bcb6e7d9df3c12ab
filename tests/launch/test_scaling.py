"""scripts/scaling_test.py on two hosts.    pytest tests/launch/test_scaling.py"""

import re
import signal
import sys

import namespaces
from harness.processes import wait_until
from namespaces import needs_hosts

pytest_plugins = ["namespaces"]
SCRIPT = ("-m", "scripts.scaling_test")


@needs_hosts
def test_a_slow_link_shows_and_a_failed_size_is_a_line(hosts, tmp_path, tiny_config):
    """Two hosts send 4 Mbit/s, so that a step's gradients, 0.2 MB, take at least 0.4 s. A third
    host does not exist.
    """
    for i in (1, 2):
        namespaces.sh(
            f"ip netns exec {namespaces.TAG}{i} tc qdisc add dev eth0 root tbf rate 4mbit "
            "burst 32kbit latency 400ms"
        )
    (tmp_path / "hostfile").write_text("node-1 slots=1\nnode-2 slots=1\nnode-9 slots=1\n")
    weights_of = {"resume": tmp_path / "other_run", "weights_only": True}
    done = namespaces.run(
        hosts, sys.executable, *SCRIPT, "--hostfile", tmp_path / "hostfile",
        "--nodes", "1", "2", "3", "--steps", "10", "--output", tmp_path / "out", "--",
        "train.py", "--config", tiny_config(checkpoint=weights_of),
        code=1,
    )  # fmt: skip
    assert "3 nodes: node-9" in done.output, done.output
    *_, efficiency, grown_most = re.search(r"^2 +2 .*$", done.output, re.MULTILINE)[0].split()
    assert float(efficiency) < 0.7, done.output
    assert grown_most.endswith("_seconds") and grown_most != "data_seconds"
    assert not [*(tmp_path / "out").glob("*/checkpoints/step_*")]


@needs_hosts
def test_ctrl_c_ends_the_measurement(hosts, hostfile, tmp_path, tiny_config):
    process = namespaces.start(
        hosts, tmp_path / "log", sys.executable, *SCRIPT, "--hostfile", hostfile,
        "--nodes", "1", "2", "--steps", "1000", "--output", tmp_path / "out", "--",
        "train.py", "--config", tiny_config(),
    )  # fmt: skip
    try:
        wait_until((tmp_path / "out" / "nodes_1" / "metrics.jsonl").exists, process)
        process.send_signal(signal.SIGINT)
        assert process.wait(200) == 1, (tmp_path / "log").read_text()
    finally:
        process.kill()
    assert "\n2 " not in (tmp_path / "log").read_text()
    assert not (tmp_path / "out" / "nodes_2").exists()
