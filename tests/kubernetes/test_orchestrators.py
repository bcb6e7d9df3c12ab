"""The manifests and the SkyPilot task of deploy/ are valid, and their commands run on two hosts.

pytest tests/kubernetes/test_orchestrators.py
"""

import json
import os
import shlex
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import namespaces
import pytest
import yaml
from harness.processes import environment, wait_until
from harness.repository import REPO
from harness.runs import determined
from namespaces import needs_hosts

from zerotrain.config.schema import DistributedConfig
from zerotrain.runtime.errors import EXIT_PREEMPTED, EXIT_USER_MISTAKE

pytest_plugins = ["namespaces"]
DEPLOY = REPO / "deploy"
CLAIM, JOB_SET, POLICY, DISK = (
    yaml.safe_load((DEPLOY / f"{name}.yaml").read_text())
    for name in ("kubernetes/storage", "kubernetes/jobset", "kubernetes/network", "disk")
)
SKYPILOT = yaml.safe_load((DEPLOY / "skypilot.yaml").read_text())
JOB = JOB_SET["spec"]["replicatedJobs"][0]["template"]["spec"]
POD = JOB["template"]["spec"]
CONTAINER = POD["containers"][0]
WORDS = [*CONTAINER["command"], *CONTAINER["args"]]


def option(name, words=WORDS):
    return next(value for flag, value in pairwise(words) if flag == name)


# --------------------------------------------------------------------------------------------------
# Contents of the files


def test_the_manifests_are_objects_of_their_apis():
    """The APIs' models accept every field and keep it."""
    # not at the top, or each process that runs tests would import its hundreds of modules
    models = pytest.importorskip("kubeflow_trainer_api.models")
    assert models.IoK8sApiCoreV1PersistentVolumeClaim.from_dict(CLAIM).to_dict() == CLAIM
    assert models.JobsetV1alpha2JobSet.from_dict(JOB_SET).to_dict() == JOB_SET
    assert models.IoK8sApiCoreV1Pod.from_dict(DISK).to_dict() == DISK


def test_the_pods_have_the_memory_disk_time_and_network_that_training_needs():
    assert POD["terminationGracePeriodSeconds"] > DistributedConfig().preempt_grace_seconds + 30
    volumes = {volume["name"]: volume for volume in POD["volumes"]}
    mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in CONTAINER["volumeMounts"]}
    assert mounts["/dev/shm"]["emptyDir"]["medium"] == "Memory"
    claim = {"claimName": CLAIM["metadata"]["name"]}
    assert mounts["/mnt/train"]["persistentVolumeClaim"] == claim
    assert CLAIM["spec"]["accessModes"] == ["ReadWriteMany"]
    for key in ("securityContext", "restartPolicy"):
        assert DISK["spec"][key] == POD[key]
    assert DISK["spec"]["volumes"] == POD["volumes"][:1]
    assert option("--nodes") == str(JOB["completions"]) == str(JOB["parallelism"])
    gpus = CONTAINER["resources"]["limits"]["nvidia.com/gpu"]
    assert option("--ranks_per_node") == str(gpus)
    name = JOB_SET["metadata"]["name"]
    assert option("--master_addr") == f"{name}-node-0-0.{name}"
    assert not CONTAINER["image"].endswith(":latest"), "a tag that never changes"
    pods = {"podSelector": {"matchLabels": {"jobset.sigs.k8s.io/jobset-name": name}}}
    ingress = [{"from": [pods]}]  # and from nobody else
    assert POLICY["spec"] == {**pods, "policyTypes": ["Ingress"], "ingress": ingress}


def test_exit_codes_lead_to_a_restart_or_not():
    rules = [r.get("onExitCodes", {}).get("values") for r in JOB["podFailurePolicy"]["rules"]]
    assert [EXIT_PREEMPTED] in rules and [EXIT_USER_MISTAKE] in rules, rules
    actions = [rule["action"] for rule in JOB_SET["spec"]["failurePolicy"]["rules"]]
    assert set(actions) >= {"RestartJobSetAndIgnoreMaxRestarts", "FailJobSet"}, actions
    recovery = SKYPILOT["resources"]["job_recovery"]
    assert recovery["recover_on_exit_codes"] == [EXIT_PREEMPTED]


# --------------------------------------------------------------------------------------------------
# Their commands, on two hosts


class Nodes:
    """Two pods or virtual machines: hosts with a shared disk at /mnt/train and their own home."""

    def __init__(self, hosts, config, folder):
        self.hosts, self.disk, self.log = hosts, folder / "disk", folder / "log"
        home = folder / "home"
        for made in (self.disk, home):
            made.mkdir(exist_ok=True)
        with (hosts.folder / "hosts").open("a") as names:  # as in the cluster's DNS
            names.write(f"{namespaces.PREFIX}.1 {option('--master_addr')}\n")
        for i in (1, 2):
            hosts.boot(i)
            hosts.run(
                i,
                f"mount -t tmpfs tmpfs /mnt && mkdir /mnt/train && mount --bind {self.disk} "
                f"/mnt/train && mount -t tmpfs tmpfs {home} "
                f"&& mount --bind {config} {REPO}/{option('--config')}",
            )
        kept = ("DS_ACCELERATOR", "OMP_NUM_THREADS", "HF_HUB_OFFLINE", "TORCHDYNAMO_DISABLE")
        self.environment = {name: environment()[name] for name in kept} | {
            "HOME": str(home), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }  # fmt: skip

    def start(self, command, environments):
        """Run a command in the repository on each host, with its own environment."""
        started = []
        with self.log.open("a") as log:
            for i, variables in enumerate(environments, start=1):
                pairs = [f"{k}={v}" for k, v in {**self.environment, **variables}.items()]
                words = [word.replace("$(NODE_RANK)", str(i - 1)) for word in command]
                line = shlex.join(["env", "-i", "-C", str(REPO), *pairs, *words])
                run = subprocess.Popen(self.hosts.ssh(i, line), stdout=log, stderr=log)
                started.append(run)
        return started


LOOK = """
import json, os, pathlib, sys
folder = pathlib.Path(sys.argv[sys.argv.index("--output_dir") + 1])
folder.mkdir()
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR")
(folder / "seen.json").write_text(json.dumps([os.environ[name] for name in names]))
"""


@needs_hosts
def test_a_preempted_pod_and_the_skypilot_task(forks, hosts, tiny_config, tmp_path):
    """The pods' command is preempted. A resumed run equals, bit for bit, one without interruptions.
    In the task, train.py is replaced: the pods' ranks have trained.
    """
    config = tiny_config(
        # Saves take longer than steps, so the signal arrives before the end.
        train__steps=50, checkpoint={"every_steps": 1}, ds_config="ds_configs/zero1.json",
    )  # fmt: skip
    nodes = Nodes(hosts, config, tmp_path)

    # Kubernetes sends SIGTERM to the second pod. Both pods save and exit with 75, and JobSet starts
    # both again.
    one_rank = [*WORDS]
    one_rank[one_rank.index("--ranks_per_node") + 1] = "1"
    variables = {v["name"]: v["value"] for v in CONTAINER["env"] if "value" in v}
    pods = nodes.start(one_rank, [variables, variables])
    folder = nodes.disk / Path(option("--output_dir")).relative_to("/mnt/train")
    wait_until(lambda: [*folder.glob("checkpoints/*/COMPLETE")], pods[0], nodes.log)
    pattern = "'^[^ ]*python -u -m zerotrain.launch.node'"  # until none is left
    hosts.run(2, f"while pkill -TERM -f {pattern}; do sleep 0.05; done")
    assert [pod.wait(240) for pod in pods] == [EXIT_PREEMPTED] * 2, nodes.log.read_text()
    for at in (folder, tmp_path / "whole"):  # as forks, and without saves, they take less time
        flags = ["--output_dir", at, "--checkpoint.every_steps", 50]
        output = forks.finish(config, *flags, ranks=2).output
        assert ("resuming from" in output) == (at == folder), output
    whole = determined(tmp_path / "whole")
    assert determined(folder) == whole and len(whole) == 50

    # Under SkyPilot, each node has its own folder of the bucket as its disk.
    look = tmp_path / "look.py"
    look.write_text(LOOK)
    for i in (1, 2):
        hosts.run(i, f"mount --bind {look} {REPO}/train.py")
    addresses = [f"{namespaces.PREFIX}.{i}" for i in (1, 2)]
    environments = [
        {"SKYPILOT_NODE_RANK": str(rank), "SKYPILOT_NODE_IPS": "\n".join(addresses),
         "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NUM_GPUS_PER_NODE": "1"}
        for rank in range(2)
    ]  # fmt: skip
    started = nodes.start(["bash", "-c", SKYPILOT["run"]], environments)
    assert [node.wait(240) for node in started] == [0, 0], nodes.log.read_text()
    for rank in range(2):
        seen = json.loads((nodes.disk / f"node_{rank}" / "demo" / "seen.json").read_text())
        assert seen == [str(rank), "0", "2", addresses[0]]
