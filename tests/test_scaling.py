"""scripts/scaling_test.py: how speed grows with nodes.    pytest tests/test_scaling.py"""

import re
import sys

import namespaces
from conftest import REPO
from namespaces import needs_hosts

pytest_plugins = ["namespaces"]
SCRIPT = REPO / "scripts" / "scaling_test.py"


@needs_hosts
def test_a_slow_link_shows_and_a_failed_size_is_a_line(hosts, tmp_path, tiny_config):
    """Two hosts that send 4 Mbit/s, so that the gradients of a step, 0.2 MB, take 0.4 s and more;
    and a third one that does not exist.
    """
    for i in (1, 2):
        namespaces.sh(
            f"ip netns exec {namespaces.TAG}{i} tc qdisc add dev eth0 root tbf rate 4mbit "
            "burst 32kbit latency 400ms"
        )
    (tmp_path / "hostfile").write_text("node-1 slots=1\nnode-2 slots=1\nnode-9 slots=1\n")
    done = namespaces.run(
        hosts, tmp_path / "log", sys.executable, SCRIPT, "--hostfile", tmp_path / "hostfile",
        "--nodes", "1,2,3", "--steps", "15", "--output", tmp_path / "out", "--",
        "train.py", "--config", tiny_config(),
    )  # fmt: skip
    assert done.code == 1, done.output
    assert "3 nodes: node-9" in done.output, done.output
    two = re.search(r"^2 nodes  2 ranks .* efficiency ([\d.]+)%.*$", done.output, re.MULTILINE)
    assert float(two[1]) < 70, done.output
    assert re.search("grown most: (forward|backward|optimizer)", two[0]), done.output
    assert not [*(tmp_path / "out").glob("*/checkpoints/step_*")]
