"""deploy/: the manifests and the SkyPilot task are valid, and what they run is run, on two hosts.

pytest tests/test_orchestrators.py
"""

import copy
import importlib.util
import os
import re
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from conftest import REPO, determined, environment, free_port, run, wait_until
from kubeflow_trainer_api import models

from checkpoint.find import checkpoint_problem
from config.schema import LaunchConfig
from runtime.errors import EXIT_PREEMPTED, EXIT_USER_MISTAKE, UserError

DEPLOY = REPO / "deploy"
MANIFESTS = [
    document
    for file in ("storage", "jobset", "trainjob")
    for document in yaml.safe_load_all((DEPLOY / "kubernetes" / f"{file}.yaml").read_text())
]
CLAIM, JOB_SET, TRAIN_JOB, RUNTIME = MANIFESTS
MODELS = {
    "PersistentVolumeClaim": models.IoK8sApiCoreV1PersistentVolumeClaim,
    "JobSet": models.JobsetV1alpha2JobSet,
    "TrainJob": models.TrainerV1alpha1TrainJob,
    "TrainingRuntime": models.TrainerV1alpha1TrainingRuntime,
}
JOB_SETS = {"JobSet": JOB_SET["spec"], "TrainingRuntime": RUNTIME["spec"]["template"]["spec"]}
PET = ("NNODES", "NPROC_PER_NODE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")  # set by Trainer
SKYPILOT = yaml.safe_load((DEPLOY / "skypilot.yaml").read_text())
WORDS = [*TRAIN_JOB["spec"]["trainer"]["args"], *SKYPILOT["run"].split()]
RECIPES = {value for flag, value in pairwise(WORDS) if flag == "--config"}
FOLDER, SKYPILOT_FOLDER = (value for flag, value in pairwise(WORDS) if flag == "--output_dir")


def job_of(kind) -> dict:
    """The Job of a JobSet; there is one."""
    (replicated,) = JOB_SETS[kind]["replicatedJobs"]
    return replicated["template"]


def container_of(kind) -> dict:
    (container,) = job_of(kind)["spec"]["template"]["spec"]["containers"]
    return container


# --------------------------------------------------------------------------------------------------
# What the files say


def differs(document) -> bool:
    """Whether the API has no such object: its models refuse it, or lose some of it."""
    try:
        return MODELS[document["kind"]].from_dict(document).to_dict() != document
    except ValueError:
        return True


@pytest.mark.parametrize("kind", MODELS)
def test_the_manifests_are_objects_of_their_apis(kind):
    (document,) = [document for document in MANIFESTS if document["kind"] == kind]
    assert not differs(document)
    changed = copy.deepcopy(document)
    changed["spec"]["nonsense"] = 1
    assert differs(changed)


def test_pods_with_unknown_fields_are_noticed():
    for path, value in (("hostNetworks", True), ("terminationGracePeriodSeconds", "180s")):
        changed = copy.deepcopy(JOB_SET)
        changed["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"][path] = value
        assert differs(changed)


@pytest.mark.parametrize("version", ["1.31", "1.37"])
def test_kubernetes_accepts_the_jobs(version):
    """Its schemas know the values of enumerations. podFailurePolicy is stable since 1.31."""
    kubernetes_validate = pytest.importorskip(
        "kubernetes_validate", reason="100 MB: pip install kubernetes-validate==1.37.0"
    )
    meta = {"metadata": {"name": "train"}}
    jobs = [{"apiVersion": "batch/v1", "kind": "Job", **meta, **job_of(kind)} for kind in JOB_SETS]
    for document in (CLAIM, *jobs):
        kubernetes_validate.validate(document, version, strict=True)
    jobs[0]["spec"]["podFailurePolicy"]["rules"][0]["nonsense"] = 1
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(jobs[0], version, strict=True)
    del jobs[0]["spec"]["podFailurePolicy"]["rules"][0]["nonsense"]


def test_the_pods_of_both_are_the_same():
    """Apart from what Trainer adds: number of nodes, PET_* variables, the job's arguments."""
    ours, theirs = (copy.deepcopy(job_of(kind)["spec"]) for kind in ("JobSet", "TrainingRuntime"))
    trainer = TRAIN_JOB["spec"]["trainer"]
    container = theirs["template"]["spec"]["containers"][0]
    container |= {"args": trainer["args"], "image": trainer["image"]}
    theirs |= {
        "completions": trainer["numNodes"], "parallelism": trainer["numNodes"],
        "completionMode": "Indexed",
    }  # fmt: skip
    pet = [v for v in container_of("JobSet")["env"] if v["name"].startswith("PET_")]
    container["env"] = pet + container["env"]
    assert {variable["name"] for variable in pet} == {f"PET_{name}" for name in PET}
    assert TRAIN_JOB["metadata"]["name"] == JOB_SET["metadata"]["name"], "see PET_MASTER_ADDR"
    assert theirs == ours
    assert JOB_SETS["JobSet"]["failurePolicy"] == JOB_SETS["TrainingRuntime"]["failurePolicy"]
    assert RUNTIME["spec"]["mlPolicy"] == {"numNodes": trainer["numNodes"], "torch": {}}
    assert trainer["numProcPerNode"] == container["resources"]["limits"]["nvidia.com/gpu"]
    assert TRAIN_JOB["spec"]["runtimeRef"]["name"] == RUNTIME["metadata"]["name"]
    # the labels and names by which Trainer finds the pods' container
    labels = job_of("TrainingRuntime")["metadata"]["labels"]
    assert labels == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    assert container["name"] == JOB_SETS["TrainingRuntime"]["replicatedJobs"][0]["name"] == "node"


def test_the_pods_have_what_training_needs():
    job = job_of("JobSet")["spec"]
    pod, container = job["template"]["spec"], container_of("JobSet")
    assert pod["terminationGracePeriodSeconds"] > LaunchConfig().preempt_grace_seconds + 30
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
    assert mounts["/dev/shm"]["emptyDir"]["medium"] == "Memory"
    disk, claim = mounts["/mnt/train"], {"claimName": CLAIM["metadata"]["name"]}
    assert "hostPath" in disk or disk["persistentVolumeClaim"] == claim
    assert CLAIM["spec"]["accessModes"] == ["ReadWriteMany"]
    limits, security = container["resources"]["limits"], container.get("securityContext", {})
    uses_rdma = limits.keys() > {"cpu", "memory", "nvidia.com/gpu"}  # its name is the cluster's
    assert uses_rdma == ("IPC_LOCK" in security.get("capabilities", {}).get("add", []))
    assert uses_rdma == (security.get("runAsUser") == 0)
    variables = {variable["name"]: variable for variable in container["env"]}
    for name in variables:
        if re.search("KEY|TOKEN|SECRET", name):
            assert "secretKeyRef" in variables[name]["valueFrom"], name
    assert variables["PET_NNODES"]["value"] == str(job["completions"]) == str(job["parallelism"])
    assert variables["PET_NPROC_PER_NODE"]["value"] == str(limits["nvidia.com/gpu"])
    name = JOB_SET["metadata"]["name"]
    assert variables["PET_MASTER_ADDR"]["value"] == f"{name}-node-0-0.{name}"


def action_after(code: int, disrupted: bool) -> str:
    """What JobSet does when a pod has ended: the first rule of the Job that matches it gives the
    reason and the message of the Job's failure, and the first rule of the JobSet that matches those
    the action.
    """
    reason, message = "BackoffLimitExceeded", "Job has reached the specified backoff limit"
    for index, rule in enumerate(job_of("JobSet")["spec"]["podFailurePolicy"]["rules"]):
        assert rule["action"] == "FailJob"
        codes, conditions = rule.get("onExitCodes"), rule.get("onPodConditions")
        if codes and code in codes["values"]:
            why = f"Container node for pod default/train-node-0-1-x failed with exit code {code}"
        elif conditions and disrupted:
            why = "Pod default/train-node-0-1-x has condition DisruptionTarget"
        else:
            continue
        reason, message = "PodFailurePolicy", f"{why} matching FailJob rule at index {index}"
        break
    for rule in JOB_SETS["JobSet"]["failurePolicy"]["rules"]:
        patterns = rule["onJobFailureMessagePatterns"]
        if reason in rule["onJobFailureReasons"] and any(re.search(p, message) for p in patterns):
            return rule["action"]
    return "RestartJobSet"


def test_exit_codes_lead_to_a_restart_or_not():
    uncounted = "RestartJobSetAndIgnoreMaxRestarts"
    assert action_after(EXIT_PREEMPTED, disrupted=True) == uncounted
    assert action_after(EXIT_PREEMPTED, disrupted=False) == uncounted
    assert action_after(143, disrupted=True) == uncounted, "before there was anything to save"
    assert action_after(EXIT_USER_MISTAKE, disrupted=False) == "FailJobSet"
    for code in (1, 137, 143):
        assert action_after(code, disrupted=False) == "RestartJobSet"
    assert JOB_SETS["JobSet"]["failurePolicy"]["maxRestarts"] > 0
    recovery = SKYPILOT["resources"]["job_recovery"]
    assert recovery["recover_on_exit_codes"] == [EXIT_PREEMPTED]
    assert recovery["max_restarts_on_errors"] > 0


def test_skypilot_accepts_the_task(tmp_path):
    if importlib.util.find_spec("sky") is None:
        pytest.skip("300 MB: pip install skypilot==0.14.1")
    say = (
        "import sky; task = sky.Task.from_yaml('deploy/skypilot.yaml'); print(task.num_nodes,"
        " [r.job_recovery for r in task.resources], [m.mode for m in task.storage_mounts.values()])"
    )
    finished = subprocess.run(
        [sys.executable, "-c", say], cwd=REPO, env={**environment(), "HOME": str(tmp_path)},
        capture_output=True, text=True,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr
    assert (
        finished.stdout.startswith(f"{SKYPILOT['num_nodes']} [{{")
        and "MOUNT_CACHED" in finished.stdout
    )


# --------------------------------------------------------------------------------------------------
# deploy/node.py


@pytest.mark.launch
def test_the_exit_code_is_that_of_a_rank(tmp_path):
    """Of a rank that a signal kills: 128 + its number. Without ranks, the signal ends the node."""
    (tmp_path / "rank.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    node = [sys.executable, DEPLOY / "node.py", "--nnodes"]
    killed = run([*node, "1", "--master_port", free_port(), tmp_path / "rank.py"])
    assert killed.code == 128 + signal.SIGKILL and "Traceback" not in killed.output, killed.output

    port = free_port()
    waiting = [*node, "2", "--node_rank", "0", "--master_addr", "127.0.0.1", "--master_port", port]
    process = subprocess.Popen(
        [str(word) for word in [*waiting, "rank.py"]], env=environment(), stderr=subprocess.PIPE
    )
    wait_until(lambda: f":{int(port):04X} " in Path("/proc/net/tcp6").read_text(), process)
    process.terminate()
    assert process.wait(30) == 128 + signal.SIGTERM, process.stderr.read()


# --------------------------------------------------------------------------------------------------
# What they run, on two hosts


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    namespaces = pytest.importorskip("namespaces", reason="this copy has no cluster/")
    if reason := namespaces.why_not():
        pytest.skip(reason)
    made = namespaces.Hosts(tmp_path_factory.mktemp("hosts"), 2).up()
    with (made.folder / "hosts").open("a") as names:  # as the DNS of the cluster has it
        names.write(f"{namespaces.PREFIX}.1 {environments_of_pods()[0]['PET_MASTER_ADDR']}\n")
    made.addresses = [f"{namespaces.PREFIX}.{i}" for i in (1, 2)]
    yield made
    made.down()


class Nodes:
    """Two pods or virtual machines: hosts with a disk at /mnt/train and a home of their own."""

    def __init__(self, hosts, config, disk, home) -> None:
        self.hosts, self.log = hosts, disk.with_suffix(".log")
        disk.mkdir(exist_ok=True)
        home.mkdir(exist_ok=True)
        for i in (1, 2):
            hosts.boot(i)
            hosts.run(
                i,
                f"mount -t tmpfs tmpfs /mnt && mkdir /mnt/train && mount --bind {disk} /mnt/train"
                f" && mount -t tmpfs tmpfs {home}"
                + "".join(f" && mount --bind {config} {REPO}/{recipe}" for recipe in RECIPES),
            )
        here = {"DS_ACCELERATOR", "OMP_NUM_THREADS", "HF_HUB_OFFLINE"}
        self.environment = {k: v for k, v in environment().items() if k in here} | {
            "HOME": str(home), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }  # fmt: skip

    def start(self, command, environments) -> list[subprocess.Popen]:
        """Run a command in the repository on each host, with its own environment."""
        started = []
        with self.log.open("a") as log:
            for i, variables in enumerate(environments, start=1):
                pairs = [f"{k}={v}" for k, v in {**self.environment, **variables}.items()]
                words = ["env", "-i", "-C", str(REPO), *pairs, *command]
                started.append(
                    subprocess.Popen(
                        self.hosts.ssh(i, shlex.join(words)), stdout=log, stderr=subprocess.STDOUT
                    )
                )
        return started

    def until(self, happened, seconds=120) -> None:
        deadline = time.monotonic() + seconds
        while not happened():
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.01)


def environments_of_pods() -> list[dict[str, str]]:
    """The environment of each pod's container, for two pods with one rank each."""
    secret = {"LAUNCH_SECRET": secrets.token_hex(32)}
    environments = []
    for index in range(2):
        variables = {}
        for variable in container_of("JobSet")["env"]:
            source = variable.get("valueFrom", {})
            if "fieldRef" in source:
                assert "job-completion-index" in source["fieldRef"]["fieldPath"]
                variables[variable["name"]] = str(index)
            elif "secretKeyRef" not in source:
                variables[variable["name"]] = variable["value"]
            elif source["secretKeyRef"]["key"] in secret:
                variables[variable["name"]] = secret[source["secretKeyRef"]["key"]]
        environments.append({**variables, "PET_NNODES": "2", "PET_NPROC_PER_NODE": "1"})
    return environments


@pytest.mark.launch
def test_a_preempted_pod_and_a_lost_spot_node(forks, hosts, tiny_config, tmp_path, monkeypatch):
    """Each run is interrupted, resumed, and then bit for bit that which was not."""
    config = tiny_config(
        train__epochs=None, train__steps=50, checkpoint={"every_steps": 10},
        ds_config="ds_configs/zero1.json",
    )  # fmt: skip
    whole = forks.train(config, "--output_dir", tmp_path / "whole", ranks=2)
    assert whole.code == 0, whole.output

    # Kubernetes: SIGTERM to the second pod. Both save and exit with 75, and JobSet starts both
    # again: here the same arguments, on ranks that are quicker to start.
    disk = tmp_path / "disk"
    nodes = Nodes(hosts, config, disk, tmp_path / "home")
    container = container_of("JobSet")
    pods = nodes.start([*container["command"], *container["args"]], environments_of_pods())
    folder = disk / Path(FOLDER).relative_to("/mnt/train")
    nodes.until((folder / "checkpoints" / "step_00000010" / "COMPLETE").exists)
    hosts.run(2, "pkill -TERM -f '^[^ ]*python deploy/node.py'")
    assert [pod.wait(120) for pod in pods] == [EXIT_PREEMPTED] * 2, nodes.log.read_text()
    assert "preempted, saved: step" in nodes.log.read_text()
    resumed = forks.train(config, "--output_dir", folder, ranks=2)
    assert resumed.code == 0 and "resuming from" in resumed.output, resumed.output
    assert determined(folder) == determined(tmp_path / "whole")

    # SkyPilot: the cloud takes the machines away, and the task starts on two others. The first
    # start is again of ranks that are quicker, each with its own folder of the bucket as its disk.
    bucket, home = tmp_path / "bucket", tmp_path / "home"
    disks = [bucket / f"node_{rank}" for rank in range(2)]
    for disk in disks:
        disk.mkdir(parents=True)
    (home / "node").mkdir()
    name = Path(SKYPILOT_FOLDER).name
    flags = ("--output_dir", home / "node" / name, "--checkpoint.node_local", "true")
    lost = forks.start(config, *flags, disks=dict.fromkeys(disks, 1), at=home / "node")
    lost.until((disks[1] / name / "checkpoints" / "step_00000020" / "COMPLETE").exists)
    for rank in range(2):
        lost.kill(rank)
    lost.wait()
    environments = [
        {
            "SKYPILOT_NODE_RANK": str(rank), "SKYPILOT_NODE_IPS": "\n".join(hosts.addresses),
            "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NUM_GPUS_PER_NODE": "1",
        }
        for rank in range(2)
    ]  # fmt: skip
    nodes = Nodes(hosts, config, bucket, home)
    started = nodes.start(["bash", "-c", SKYPILOT["run"]], environments)
    assert [node.wait(240) for node in started] == [0, 0], nodes.log.read_text()
    assert re.search(r"resuming from \S+/step_000000\d\d: step \d\d\n", nodes.log.read_text())
    assert determined(disks[0] / name) == determined(tmp_path / "whole")

    # The nodes' shards in the bucket become one checkpoint.
    from scripts import gather_checkpoint

    command = ["gather_checkpoint", "--disks", bucket, name, tmp_path / "gathered"]
    monkeypatch.setattr(sys, "argv", [str(word) for word in command])
    gather_checkpoint.main()
    assert checkpoint_problem(tmp_path / "gathered") is None
    shutil.rmtree(disks[1])
    monkeypatch.setattr(sys, "argv", [*sys.argv[:-1], str(tmp_path / "other")])
    with pytest.raises(UserError, match=r"no folder in \S+ has the files of rank 1; are all nodes"):
        gather_checkpoint.main()
