"""scripts/preflight.py on hosts in namespaces, and its findings from given facts.

The faults are real ones: another commit, another package, a firewall, a clock that is ahead.
"""

import importlib.util
import json
import re
import subprocess
import sys
import threading
import time
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace

import namespaces
import pytest
import yaml
from conftest import REPO, SAMPLE, Finished, run

from cluster import check_hosts as preflight
from cluster import probe
from cluster.check_collectives import judge_pairs, judge_rates
from cluster.check_hosts import (
    Finding,
    check_code,
    check_gpus,
    check_output,
    check_paths,
    judge_clocks,
    judge_mesh,
    unlike_most,
)
from cluster.collectives import rounds
from runtime.host_memory import available_memory

WHY_NOT = namespaces.why_not()
launched = [pytest.mark.launch, pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))]
PREFLIGHT = [sys.executable, "scripts/preflight.py"]
CLOCK_AHEAD = """import time
real = time.time
time.time = lambda: real() + 30
"""  # only on that host; libfaketime would make Python's own waits hang


class Job:
    """A hostfile, a config, rows and an output folder, as hosts in namespaces see them."""

    def __init__(self, hosts, folder):
        self.hosts, self.folder = hosts, folder
        self.rows, self.held_out = folder / "rows", folder / "held_out"
        self.output, self.hostfile = folder / "output", folder / "hostfile"
        for path in (self.rows, self.held_out, self.output):
            path.mkdir()
        rows = (SAMPLE / "train.jsonl").read_text().splitlines()[:40]
        (self.rows / "train.jsonl").write_text("\n".join(rows[:30]) + "\n")
        (self.held_out / "eval.jsonl").write_text("\n".join(rows[30:]) + "\n")
        self.config = folder / "config.yaml"
        config = {
            "output_dir": str(self.output),
            "model": {"name_or_path": str(SAMPLE / "model"), "from_config": True},
            "data": {
                "train_sources": [str(self.rows / "train.jsonl")],
                "eval_sources": [str(self.held_out / "eval.jsonl")],
            },
            "train": {"learning_rate": 1e-3, "steps": 1, "global_batch_size": 128},
        }
        self.config.write_text(yaml.safe_dump(config))

    def preflight(self, *options, slots=(1, 1)) -> Finished:
        lines = [f"node-{i} slots={n}\n" for i, n in enumerate(slots, start=1)]
        self.hostfile.write_text("".join(lines))
        command = [
            *PREFLIGHT, "--hostfile", self.hostfile, "--config", self.config,
            "--ssh_args", f"-F {self.hosts.ssh_config}", *options,
        ]  # fmt: skip
        return run(command, timeout=180)

    def other_commit(self) -> dict[Path, Path]:
        """Bind mounts with which a host has another commit, in which one file is different."""
        file = REPO / "runtime" / "seeding.py"
        changed = self.folder / "seeding.py"
        changed.write_text(file.read_text() + "# another version\n")
        if not (REPO / ".git").exists():
            return {changed: file}
        clone = self.folder / "clone"
        git = ["git", "-c", "user.name=test", "-c", "user.email=test@localhost"]
        subprocess.run([*git, "clone", "-q", REPO, clone], check=True)
        commit = [*git, "-C", clone, "commit", "-q", "--allow-empty", "-m", "another"]
        subprocess.run(commit, check=True)
        its = clone / ".git"
        if (REPO / ".git").is_file():  # a worktree
            its = self.folder / "gitfile"
            its.write_text(f"gitdir: {clone / '.git'}\n")
        return {changed: file, its: REPO / ".git"}


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    hosts = namespaces.Hosts(tmp_path_factory.mktemp("hosts"), 3)
    try:
        yield Job(hosts.up(), tmp_path_factory.mktemp("job"))
    finally:
        hosts.down()


def failures(output) -> list[str]:
    return [line.removeprefix("FAIL  ") for line in output.splitlines() if line[:6] == "FAIL  "]


def cells(output) -> dict[tuple[str, str], str]:
    """(host, check) -> word, parsed from the printed table."""
    lines = output.split("\n\n")[0].splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("host "))
    columns = [(m[0], m.start()) for m in re.finditer(r"\S+", lines[start])]
    ends = [at for _, at in columns[1:]] + [None]
    return {
        (line.split()[0], name): line[at:end].strip()
        for line in lines[start + 1 :]
        for (name, at), end in zip(columns, ends, strict=True)
    }


def found(output, check, *texts) -> str:
    """The only failure line of a check that matches all texts."""
    texts = (f" {check}: ", *texts)
    lines = [line for line in failures(output) if all(re.search(t, line) for t in texts)]
    assert len(lines) == 1, output
    return lines[0]


class TestHosts:
    pytestmark = launched

    def test_healthy_hosts_pass_all_checks(self, job):
        finished = job.preflight()
        table = cells(finished.output)
        assert finished.code == 0, finished.output
        assert failures(finished.output) == []
        assert {host for host, _ in table} == {"node-1", "node-2"}
        checks = [*preflight.CHECKS, "group", "sum", "net", "matmul"]
        for (_, check), word in table.items():
            # the repository may have uncommitted changes, and the hosts share their cores
            allowed = {"gpu": {"no GPU", "ok"}, "code": {"ok", "warn"}, "matmul": {"ok", "warn"}}
            assert check == "host" or word in allowed.get(check, {"ok"}), (check, word)
        assert all((host, c) in table for host in ("node-1", "node-2") for c in checks)
        assert re.search(
            r"gloo, 2 ranks: all-reduce of 8 MiB [\d,]+ MB/s \(bus bandwidth\); slowest pair of "
            r"hosts node-1 - node-2 [\d,]+ MB/s; matmul [\d,]+ to [\d,]+ GFLOP/s per rank",
            finished.output,
        )
        assert list(job.output.iterdir()) == []  # the token was removed

    # ----------------------------------------------------------------------------------------------
    # One host that differs from the others in nearly everything

    @pytest.fixture(scope="class")
    def unlike(self, job):
        elsewhere, shadow = job.folder / "elsewhere", job.folder / "shadow"
        elsewhere.mkdir()
        (shadow / "deepspeed").mkdir(parents=True)
        (shadow / "deepspeed" / "__init__.py").write_text('__version__ = "0.18.0"\n')
        (shadow / "sitecustomize.py").write_text(CLOCK_AHEAD)
        eval_rows = (job.held_out / "eval.jsonl").read_text()
        (job.folder / "eval.jsonl").write_text(eval_rows.replace("2", "3", 1))  # same size
        (job.folder / "edited").write_text("node-1 slots=1\nnode-2 slots=2\n")
        (job.folder / "bashrc").write_text("echo welcome; printf 'it is noon'\n")
        job.hostfile.touch()
        binds = {
            elsewhere: job.rows,
            job.folder / "eval.jsonl": job.held_out / "eval.jsonl",
            job.folder / "edited": job.hostfile,
            job.folder / "bashrc": Path.home() / ".bashrc",
            **job.other_commit(),
        }
        job.hosts.boot(2, binds, {"PYTHONPATH": shadow}, read_only=(job.output,))
        job.hosts.block(1, "tcp dport 29600 drop")
        try:
            return job.preflight("--master_port", "29600")
        finally:
            job.hosts.unblock(1)
            job.hosts.boot(2)

    @pytest.mark.parametrize(
        "check, texts",
        [
            ("code", [r"runtime/seeding.py differs from the others'", "check out one commit"]),
            ("versions", [r"deepspeed is 0\.18\.0 from \S+/shadow/deepspeed, elsewhere 0\.19"]),
            ("data", [r"train_sources: no such file or folder: \S+/rows/train\.jsonl; copy it"]),
            ("data", [r"eval_sources: \S+/eval\.jsonl has other contents than elsewhere; copy"]),
            ("output", [r"cannot be written to \(Read-only file system\); fix owner or mount"]),
            ("hostfile", [r"says slots=2 for node-2, the launcher's says slots=1; copy one file"]),
            ("master", [r"cannot connect to \S+ port 29600 on node-1 \(timed out\).*firewall"]),
            ("clock", [r"clock is (29\.\d|30\.\d) s ahead of the others; start chrony"]),
        ],
    )
    def test_one_line_names_host_and_cause(self, unlike, check, texts):
        assert unlike.code == 1
        assert found(unlike.output, check, *texts).startswith("node-2: ")

    def test_another_commit_is_named(self, unlike):
        if not (REPO / ".git").exists():
            pytest.skip("not a git checkout")
        found(unlike.output, "code", r"commit is [0-9a-f]{10}, elsewhere [0-9a-f]{10}")

    def test_nothing_else_fails_and_the_collectives_checks_are_skipped(self, unlike):
        failed = {key for key, word in cells(unlike.output).items() if word == "FAIL"}
        expected = {"code", "versions", "data", "output", "hostfile", "master", "clock"}
        assert failed == {("node-2", check) for check in expected}, unlike.output
        assert "warn  node-2: ssh: its shell prints `it is noon`: let ~/.bashrc" in unlike.output
        assert len(failures(unlike.output)) == len(expected) + 1  # two kinds of data
        assert "the collectives checks were skipped: a hosts check failed" in unlike.output

    # ----------------------------------------------------------------------------------------------
    # Slots, addresses, firewalls and disks

    @pytest.fixture(scope="class")
    def misplaced(self, job):
        """A wrong master address; on node-2 too many slots, a firewall for incoming connections
        and its own output folder; node-3 is unreachable.
        """
        (job.folder / "own_output").mkdir()
        job.hosts.boot(2, {job.folder / "own_output": job.output})
        job.hosts.block(2, "tcp dport 1024-65535 tcp flags & (syn | ack) == syn drop")
        job.hosts.cut(3)
        try:
            wrong = f"{namespaces.PREFIX}.77"
            return job.preflight("--stage", "1", "--master_addr", wrong, slots=(1, 64, 1))
        finally:
            job.hosts.mend(3)
            job.hosts.unblock(2)
            job.hosts.boot(2)

    @pytest.mark.parametrize(
        "check, host, texts",
        [
            ("master", "node-1", [r"--master_addr \S+\.77 is not one of its addresses \(10\."]),
            ("slots", "node-2", [r"slots=64, but it has \d+ cores and no GPU; use at most slots="]),
            ("ssh", "node-3", [r"cannot be reached over ssh \(.*(No route|timed out)"]),
            ("mesh", "node-2", [r"node-1 cannot connect to it at \S+ port \d+ \(timed out\)"]),
            ("output", "node-2", [r"node-local: none of the other hosts see what node-1 writes"]),
        ],
    )
    def test_one_line_names_the_host_that_is_misplaced(self, misplaced, check, host, texts):
        assert misplaced.code == 1
        assert found(misplaced.output, check, *texts).startswith(f"{host}: ")

    def test_an_unreachable_host_does_not_hide_the_others(self, misplaced):
        table = cells(misplaced.output)
        assert {key for key, word in table.items() if word == "FAIL"} == {
            ("node-1", "master"), ("node-2", "slots"), ("node-3", "ssh"),
            ("node-2", "mesh"), ("node-2", "output"),
        }  # fmt: skip
        assert {table["node-3", check] for check in preflight.CHECKS if check != "ssh"} == {"-"}
        assert table["node-1", "versions"] == table["node-2", "versions"] == "ok"

    def test_a_wrong_interface_is_named_also_in_json(self, job):
        options = ("--env", "GLOO_SOCKET_IFNAME=eth7", "--stage", "1", "--json")
        finished = job.preflight(*options)
        report = json.loads(finished.output)
        assert finished.code == 1 and report["failed"]
        failed = [f for f in report["findings"] if f["level"] == "fail"]
        assert {f["check"] for f in failed} == {"iface"}
        assert {f["host"] for f in failed} == {"node-1", "node-2"}
        for finding in failed:
            assert "GLOO_SOCKET_IFNAME=eth7 names no interface" in finding["text"]
            assert "on eth0" in finding["text"] and finding["cure"]

    # ----------------------------------------------------------------------------------------------
    # Collectives checks

    def test_the_host_that_holds_up_the_process_group_is_named(self, job):
        """The rank of node-2 is stopped as soon as it has started."""
        stopped = threading.Event()

        def stop_rank():
            while not stopped.is_set():
                for line in job.hosts.run(2, "ps -eo pid,args").splitlines():
                    if "-m cluster.collectives" in line and "rank.py" not in line:
                        job.hosts.run(2, f"kill -STOP {line.split()[0]}")
                        stopped.set()
                time.sleep(0.2)

        thread = threading.Thread(target=stop_rank)
        thread.start()
        try:
            finished = job.preflight("--stage", "2", "--timeout", "5")
        finally:
            stopped.set()
            thread.join()
        assert finished.code == 1
        (line,) = failures(finished.output)
        assert re.match(r"node-2: group: rank 1 got no further than `.*within 5 s; the", line)
        assert cells(finished.output)["node-2", "group"] == "FAIL"
        assert not job.hosts.processes(2, "cluster.collectives")

    def test_a_slow_link_is_named(self, job):
        shape = f"ip netns exec {namespaces.TAG}3 tc qdisc add dev eth0 root tbf rate 200mbit"
        namespaces.sh(f"{shape} burst 128kb latency 100ms")
        try:
            finished = job.preflight("--stage", "2", slots=(1, 1, 1))
        finally:
            namespaces.sh(f"ip netns exec {namespaces.TAG}3 tc qdisc del dev eth0 root")
        assert finished.code == 0, finished.output  # a slow link only warns
        lines = [
            ln for ln in finished.output.splitlines() if ln.startswith("warn") and " net: " in ln
        ]
        assert len(lines) == 1, finished.output
        assert re.match(r"warn  node-3: net: \d+ MB/s at best with any other host", lines[0])


# --------------------------------------------------------------------------------------------------
# Without hosts


def test_the_odd_one_out_is_unlike_most_or_on_a_tie_unlike_the_first():
    assert unlike_most({"a": 1, "b": 2, "c": 2}) == (2, ["a"])
    assert unlike_most({"a": 1, "b": 2}) == (1, ["b"])
    assert unlike_most({"a": {"x": 1, "y": 2}, "b": {"y": 2, "x": 1}})[1] == []


def levels(findings: list[Finding]) -> dict[str, str]:
    return {f.host: f.level for f in findings}


def test_clocks_are_compared_with_the_majority():
    found = levels(judge_clocks({"a": 0.1, "b": -0.2, "c": 1.5}))
    assert found == {"a": "ok", "b": "ok", "c": "fail"}
    # the launcher's clock is wrong, not those of all hosts
    assert levels(judge_clocks({"a": 9.0, "b": 9.1, "c": 9.2})) == dict.fromkeys("abc", "ok")
    assert levels(judge_clocks({"a": 0.0, "b": -30.0})) == {"a": "ok", "b": "fail"}
    assert levels(judge_clocks({"a": 0.0, "b": None}))["b"] == "fail"


def test_a_firewall_is_blamed_on_the_host_where_it_is():
    targets = {name: (f"10.0.0.{i}", 4000) for i, name in enumerate("abcd")}
    fine = {a: {b: None for b in "abcd" if b != a} for a in "abcd"}
    assert set(levels(judge_mesh(fine, targets)).values()) == {"ok"}
    inbound = {a: {**to, **({"c": "timed out"} if a != "c" else {})} for a, to in fine.items()}
    bad = [f for f in judge_mesh(inbound, targets) if f.level == "fail"]
    assert [f.host for f in bad] == ["c"] and "no other host can connect" in bad[0].text
    outbound = {**fine, "b": dict.fromkeys("acd", "timed out")}
    bad = [f for f in judge_mesh(outbound, targets) if f.level == "fail"]
    assert [f.host for f in bad] == ["b"] and "cannot connect to any other" in bad[0].text
    one_way = {**fine, "a": {**fine["a"], "d": "refused"}}
    bad = [f for f in judge_mesh(one_way, targets) if f.level == "fail"]
    assert [f.host for f in bad] == ["d"] and bad[0].text.startswith("a cannot connect")


def test_an_uncommitted_change_warns_where_all_have_it_and_fails_where_one_has():
    def code(changed=(), checksum="1"):
        return {"code": {"commit": "c" * 40, "changed": list(changed), "files": {"x.py": checksum}}}

    assert levels(check_code({"a": code(), "b": code()})) == {"a": "ok", "b": "ok"}
    everywhere = code(["x.py"], "2")
    assert levels(check_code({"a": everywhere, "b": everywhere})) == {"a": "warn", "b": "warn"}
    assert levels(check_code({"a": code(), "b": everywhere})) == {"a": "ok", "b": "fail"}


def test_hub_models_are_compared_by_commit_and_a_download_only_warns():
    def cached(commit, weights=True):
        record = {"key": "model.name_or_path", "name": "org/m", "commit": commit}
        return {"paths": {"paths": [{**record, "weights": weights}]}}

    same = cached("a" * 40)
    assert levels(check_paths({"a": same, "b": same})) == {"a": "ok", "b": "ok"}
    assert levels(check_paths({"a": cached(None), "b": cached(None)})) == {"a": "warn", "b": "warn"}
    no_weights = cached("a" * 40, weights=False)
    assert levels(check_paths({"a": no_weights, "b": same})) == {"a": "warn", "b": "ok"}
    assert levels(check_paths({"a": same, "b": cached("b" * 40)})) == {"a": "ok", "b": "fail"}


def test_space_is_needed_for_one_checkpoint_more_than_are_kept():
    def facts(free, checkpoints):
        output = {"folder": "out", "nearest": "/", "free_bytes": free, "problem": None}
        needs = {"checkpoint_bytes": 1000, "keep": 2}
        return {"a": {"output": {**output, "checkpoints": checkpoints}, "needs": needs}}

    assert levels(check_output(facts(3000, 0))) == {"a": "ok"}
    assert levels(check_output(facts(2999, 0))) == {"a": "fail"}
    assert levels(check_output(facts(1000, 2))) == {"a": "ok"}
    assert levels(check_output(facts(999, 5))) == {"a": "fail"}


GPU = {"name": "H100", "used_bytes": 0, "total_bytes": 80 << 30, "processes": [],
       "ecc_errors": 0, "repair": [], "slowed": []}  # fmt: skip


@pytest.mark.parametrize(
    "change, text",
    [
        ({"processes": [4242], "used_bytes": 5 << 30}, "GPU 1: 5.0 GiB in use by process 4242"),
        ({"used_bytes": 9 << 30}, "9.0 GiB in use by no visible process"),
        ({"ecc_errors": 3}, "3 uncorrected memory errors"),
        ({"repair": ["pending"]}, "row remapping pending"),
        ({"slowed": ["heat"]}, "its clock is throttled (heat)"),
    ],
)
def test_a_busy_or_failing_gpu_fails_if_the_job_would_use_it(change, text):
    facts = {"a": {"gpus": {"driver": "580", "gpus": [GPU, {**GPU, **change}]}, "limits": {}}}
    bad = [f for f in check_gpus(facts, {"a": (0, 1)}) if f.level == "fail"]
    assert len(bad) == 1 and text in bad[0].text and bad[0].cure
    assert not [f for f in check_gpus(facts, {"a": (0,)}) if f.level == "fail"]


def test_slots_are_compared_with_gpus_and_a_host_without_gpus_is_named():
    two = {"gpus": {"driver": "580", "gpus": [GPU, GPU]}, "limits": {"cores": 64}}
    none = {"gpus": {"driver": None, "gpus": []}, "limits": {"cores": 64}}
    bad = [f for f in check_gpus({"a": two}, {"a": (0, 1, 2)}) if f.level == "fail"]
    assert [(f.check, f.text) for f in bad] == [("slots", "slot 2 is requested, but it has 2 GPUs")]
    facts = {"a": two, "b": two, "c": none}
    bad = [f for f in check_gpus(facts, dict.fromkeys("abc", (0, 1))) if f.level == "fail"]
    assert [(f.host, f.text) for f in bad] == [("c", "has no GPU, elsewhere H100")]


def test_gpus_are_read_through_nvml(monkeypatch):
    import pynvml

    real = {n: getattr(pynvml, n) for n in dir(pynvml) if n.startswith(("NVML", "nvmlClocks"))}

    def unknown(*_):
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    fake = SimpleNamespace(
        **real,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlSystemGetDriverVersion=lambda: "580.65",
        nvmlDeviceGetCount=lambda: 1,
        nvmlDeviceGetHandleByIndex=lambda i: i,
        nvmlDeviceGetName=lambda _: "H100",
        nvmlDeviceGetMemoryInfo=lambda _: SimpleNamespace(used=1, total=2),
        nvmlDeviceGetComputeRunningProcesses=lambda _: [SimpleNamespace(pid=7)],
        nvmlDeviceGetRemappedRows=lambda _: (0, 1, 1, 0),
        nvmlDeviceGetCurrentClocksThrottleReasons=lambda _: real[
            "nvmlClocksThrottleReasonSwThermalSlowdown"
        ],
        nvmlDeviceGetTotalEccErrors=unknown,
    )
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    assert probe.gpus() == {
        "driver": "580.65",
        "gpus": [{"name": "H100", "used_bytes": 1, "total_bytes": 2, "processes": [7],
                  "ecc_errors": None, "repair": ["pending"], "slowed": ["heat"]}],
    }  # fmt: skip


@pytest.mark.parametrize("version", [1, 2])
def test_the_tightest_memory_limit_above_counts(tmp_path, version):
    proc = tmp_path / "proc"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:   8000000 kB\n")
    top = tmp_path / "sys/fs/cgroup" / ("" if version == 2 else "memory")
    names = ("memory.max", "memory.current", "inactive_file")
    if version == 1:
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    (proc / "self/cgroup").write_text("0::/job/step\n" if version == 2 else "4:memory:/job/step\n")
    for folder, limit in (("job", "3000000"), ("job/step", "max" if version == 2 else str(2**63))):
        (top / folder).mkdir(parents=True)
        (top / folder / names[0]).write_text(f"{limit}\n")
        (top / folder / names[1]).write_text("1000000\n")
        (top / folder / "memory.stat").write_text(f"anon 5\n{names[2]} 400000\n")
    available_bytes, limited_by = available_memory(tmp_path)
    assert available_bytes == 3000000 - 1000000 + 400000
    assert limited_by.endswith("/job")
    (proc / "self/cgroup").write_text("")
    assert available_memory(tmp_path) == (8000000 * 1024, "MemAvailable")


def test_a_fingerprint_sees_names_sizes_and_contents(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text("abc")
    before = probe.fingerprint([str(file)])
    assert before["files"] == 1 and before["bytes"] == 3
    file.write_text("abd")
    assert probe.fingerprint([str(file)])["fingerprint"] != before["fingerprint"]
    (tmp_path / "more.jsonl").write_text("x")
    assert probe.fingerprint([str(tmp_path)])["files"] == 2

    big = tmp_path / "big.bin"
    with big.open("wb") as stream:
        stream.truncate(100 << 20)  # a sparse file: it takes no space
    before = probe.fingerprint([str(big)])["fingerprint"]
    with big.open("r+b") as stream:
        stream.seek(-1, 2)
        stream.write(b"x")
    assert probe.fingerprint([str(big)])["fingerprint"] != before
    with pytest.raises(FileNotFoundError):
        probe.fingerprint([str(tmp_path / "none")])


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
def test_rounds_have_every_pair_once_and_nobody_twice(count):
    every = rounds(list(range(count)))
    pairs = [tuple(sorted(pair)) for pairs in every for pair in pairs]
    assert sorted(pairs) == [(a, b) for a in range(count) for b in range(a + 1, count)]
    for pairs in every:
        players = [player for pair in pairs for player in pair]
        assert len(players) == len(set(players))


def test_slow_hosts_pairs_and_ranks_are_named_and_even_ones_are_not():
    def pairs(slow):
        return [(a, b, 10e6 if slow(a, b) else 90e6) for a, b in combinations("abcd", 2)]

    assert judge_pairs(pairs(lambda a, b: False)) == []
    (finding,) = judge_pairs(pairs(lambda a, b: "c" in (a, b)))
    assert finding.host == "c" and "10 MB/s at best" in finding.text
    (finding,) = judge_pairs(pairs(lambda a, b: (a, b) == ("a", "d")))
    assert finding.host == "a" and "between it and d" in finding.text
    assert judge_pairs([("a", "b", 1.0)]) == []

    rates = [(0, "a", 100e9), (1, "a", 99e9), (2, "b", 79e9), (3, "b", 101e9)]
    (finding,) = judge_rates(rates)
    assert (finding.host, finding.level) == ("b", "warn") and finding.text.startswith(
        "rank 2 reaches 79"
    )


def test_sixty_four_hosts_can_be_read(capsys):
    spec = importlib.util.spec_from_file_location("script", REPO / "scripts" / "preflight.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    names = [f"node-{i:02d}" for i in range(64)]
    findings = [Finding(n, "output", "fail", "is node-local", "share it") for n in names[1:]]
    findings = preflight.complete(names, [*findings, Finding("node-05", "clock", "fail", "ahead")])
    hosts = SimpleNamespace(hosts=[SimpleNamespace(name=name) for name in names])
    script.show(hosts, "1", findings, None, None)
    output = capsys.readouterr().out
    assert failures(output) == [
        "node-01, node-02, node-03 and 60 more: output: is node-local; share it",
        "node-05: clock: ahead",
    ]
    table = cells(output)
    assert table["node-63", "output"] == "FAIL" and table["node-00", "output"] == "-"
    assert max(map(len, output.splitlines())) <= 160


@pytest.mark.parametrize(
    "hostfile, options, text",
    [
        ("nowhere", [], "hostfile nowhere: cannot read"),
        ("hostfile.example", ["--timeout", "0"], "--timeout 0: must be over 0"),
        ("hostfile.example", ["--", "--train.stepps", "1"], "train.stepps: unknown key"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(hostfile, options, text):
    command = [*PREFLIGHT, "--hostfile", hostfile, "--config", "recipes/demo.yaml", *options]
    finished = run(command, timeout=60)
    assert finished.code == 2 and text in finished.output
    assert len(finished.output.splitlines()) == 1
