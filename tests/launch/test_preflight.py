"""scripts/preflight.py on healthy and faulty hosts.    pytest tests/launch/test_preflight.py"""

import json
import sys

import namespaces
import pytest
from harness.processes import run
from harness.repository import REPO, SAMPLE
from namespaces import needs_hosts

from zerotrain.launch import host_report
from zerotrain.launch.bandwidth import show
from zerotrain.launch.checks import differences
from zerotrain.launch.host_report import disk_problems, machine_problems

pytest_plugins = ["namespaces"]
GPU = {"name": "H100", "used_bytes": 0, "ecc_errors": 0}


def test_each_fault_of_a_machine_is_one_problem(monkeypatch):
    assert not [*machine_problems([GPU, GPU], ranks=2)]
    for devices, ranks in (
        ([GPU], 2),
        ([], 1000),
        ([GPU, {**GPU, "used_bytes": 4 << 30}], 2),
        ([GPU, {**GPU, "ecc_errors": 2}], 2),
    ):
        [problem] = machine_problems(devices, ranks)
        assert problem.check == "gpus" and problem.level == "FAIL"
    monkeypatch.setattr(host_report, "GIB", 1 << 60)
    assert {problem.check for problem in machine_problems([GPU], 1)} == {"limits"}, "/dev/shm"


def test_a_disk_that_is_nearly_full_is_only_a_warning(tmp_path, monkeypatch):
    monkeypatch.setattr(host_report, "MIN_FREE_BYTES", 1 << 60)
    [problem] = disk_problems(tmp_path / "run")
    assert problem.level == "warn"


@pytest.mark.parametrize(
    "changes", [{"ahead_seconds": -3.0}, {"same": {"gpus": {"models": "A100"}}}]
)
def test_a_host_that_differs_is_named(changes):
    good = {"same": {"gpus": {"models": "H100"}}, "ahead_seconds": 0.01}
    reports = {"a": good, "b": {**good, **changes}, "c": good, "lost": {"problems": []}}
    assert [host for host, _ in differences(reports)] == ["b"]
    assert not [*differences(dict.fromkeys(reports, good))]


def test_slow_pairs_are_reported_even_if_most_pairs_are_slow(capsys):
    show({"a - b": 9.0, "a - c": 1.0, "b - c": 1.1})
    assert capsys.readouterr().out.count("warning: ") == 2


def test_a_check_that_was_not_possible_is_not_shown_as_ok(tmp_path):
    (tmp_path / "hostfile").write_text("nosuch.invalid slots=1\n")
    preflight = [sys.executable, "-m", "scripts.preflight", "--hostfile", tmp_path / "hostfile"]
    done = run([*preflight, "--", "scripts/preflight.py"], code=1)
    assert done.output.split()[10:21] == ["nosuch.invalid", "FAIL", *["-"] * 9]
    assert done.output.count("ssh:") == 1, done.output


@needs_hosts
def test_faults_of_a_host_are_found_before_a_job(hosts, hostfile, tiny_config, tmp_path):
    """Reports over ssh find different code, different rows and a run folder that is not writable.
    The job on all ranks then measures healthy hosts. It also detects a host that gets no answers.
    """
    rows, code, output = tmp_path / "rows.jsonl", tmp_path / "train.py", tmp_path / "runs"
    eval_rows = SAMPLE / "eval.jsonl"
    rows.write_text(eval_rows.read_text() + "\n")
    code.write_text((REPO / "train.py").read_text() + "\n")
    output.mkdir()
    config = tiny_config(output_dir=output / "run", data__eval_sources=[eval_rows])

    def preflight(*options, command=("train.py", "--config", config), code=0):
        return namespaces.run(
            hosts, sys.executable, "-m", "scripts.preflight",
            "--hostfile", hostfile, *options, "--", *command, code=code
        )  # fmt: skip

    faults = {code: REPO / "train.py", rows: eval_rows}
    hosts.boot(2, binds={**faults, "/sys": output})  # no file can be created there
    found = preflight(code=1)
    failed = {line.split()[2] for line in found.output.splitlines() if line.startswith("FAIL")}
    assert failed == {"code:", "data:", "disk:"}, found.output
    assert "node-1:" not in found.output and "train.py" in found.output
    hosts.boot(2)
    links = tmp_path / "links.json"
    good = preflight("--timeout", "200", "--links", links)
    assert json.loads(links.read_text())["network_gb_per_s"] > 0
    for measured in ("all ranks:", "node-1 - node-2:", "matmul of rank 1 on node-2:"):
        assert measured in good.output, good.output
    one_host = "--hosts_only", "--include", "node-1"
    other_script = preflight(*one_host, command=["scripts/preflight.py"])
    on_node_1 = [*["ok"] * 4, "-", "-", "-", "ok", "-", "ok"]  # no config, model, data and disk
    assert other_script.output.split()[10:21] == ["node-1", *on_node_1]
    node_1, no_answers = f"{namespaces.TAG}1", f"blackhole {namespaces.PREFIX}.2"
    namespaces.sh(f"ip -n {node_1} route add {no_answers}")
    try:
        blocked = preflight("--timeout", "20", "--links", links, code=1)
    finally:
        namespaces.sh(f"ip -n {node_1} route del {no_answers}")
    assert "error: ports: node-2: " in blocked.output
    assert not namespaces.left_on_hosts(str(links))
