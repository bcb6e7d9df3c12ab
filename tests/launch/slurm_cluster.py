"""A SLURM cluster on one machine: munged, slurmctld, and a slurmd for each of the nodes n1 and n2.

The daemons run in their own namespaces and write to one folder. This needs root and Debian's
slurm-wlm and munge. A SLURM or munge of the machine itself is not touched.
"""

import os
import subprocess

from harness.processes import lacking, wait_until

from zerotrain.runtime.children import end_with_parent

NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "unshare")
NAMESPACES = ["unshare", "--mount", "--pid", "--uts", "--fork", "--kill-child", "--mount-proc"]
SLURM_CONF = """\
ClusterName=test
SlurmctldHost=controller(127.0.0.1)
SlurmctldPort={ports[0]}
AuthInfo=socket={folder}/munge.socket
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdSpoolDir={folder}/spool-%n
MailProg=/bin/true
MpiDefault=none
ProctrackType=proctrack/linuxproc
SwitchType=switch/none
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
# Seconds after which SLURM kills what it has ended. A busy machine saves slowly.
KillWait=300
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
GresTypes=gpu
NodeName=n1 NodeHostname=controller NodeAddr=127.0.0.11 Port={ports[1]} CPUs=2 Gres=gpu:2
NodeName=n2 NodeHostname=controller NodeAddr=127.0.0.12 Port={ports[2]} CPUs=2 Gres=gpu:2
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
# SLURM counts these files as GPUs and assigns them to jobs. Nothing opens them.
GRES_CONF = "Name=gpu File=/dev/null,/dev/zero\n"
START = """\
hostname controller
mount --make-rprivate /
mount --bind {folder}/hosts /etc/hosts
munged --force --foreground --key-file {folder}/munge.key --socket {folder}/munge.socket \
  --pid-file {folder}/munged.pid --log-file {folder}/munged.log --seed-file {folder}/munged.seed &
slurmctld -D &
slurmd -D -N n1 &
slurmd -D -N n2 &
wait
"""


def why_not() -> str | None:
    """Return why such a cluster cannot be started here, None if it can."""
    if reason := lacking(NEEDED, "slurm-wlm munge"):
        return reason
    return subprocess.run([*NAMESPACES, "true"], capture_output=True, text=True).stderr or None


class Cluster:
    """The nodes n1 and n2 with 2 CPUs and 2 gres/gpu each."""

    def __init__(self, folder, environment, ports):
        self.folder, self.ports = folder, ports
        outer = {k: v for k, v in environment.items() if not k.startswith(("SLURM", "SBATCH"))}
        self.environment = {**outer, "SLURM_CONF": str(folder / "slurm.conf")}
        self._daemons: subprocess.Popen | None = None

    def up(self):
        for name in ("state", "spool-n1", "spool-n2"):
            (self.folder / name).mkdir()
        files = {
            "slurm.conf": SLURM_CONF.format(folder=self.folder, ports=self.ports),
            "gres.conf": GRES_CONF,
            "hosts": "127.0.0.1 localhost controller\n127.0.0.11 n1\n127.0.0.12 n2\n",
            "munge.key": os.urandom(512).hex(),
        }
        for name, text in files.items():
            (self.folder / name).write_text(text)
        (self.folder / "munge.key").chmod(0o600)
        with (self.folder / "daemons.log").open("w") as log:
            self._daemons = subprocess.Popen(
                [*NAMESPACES, "bash", "-euc", START.format(folder=self.folder)],
                env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
                preexec_fn=end_with_parent,
            )  # fmt: skip
        command = ("sinfo", "--noheader", "--format=%D %T")
        log = self.folder / "slurmctld.log"
        wait_until(
            lambda: self.run(*command, check=False) == "2 idle", self._daemons, log, interval=0.1
        )
        return self

    def down(self):
        """End the daemons and all processes of all jobs.

        The kernel kills all processes of a PID namespace when its first process has ended.
        """
        if self._daemons is not None:
            self._daemons.kill()
            self._daemons.wait()
            self._daemons = None

    def run(self, *command: object, check: bool = True) -> str:
        """Run a SLURM command and return its standard output."""
        words = [str(word) for word in command]
        done = subprocess.run(words, env=self.environment, capture_output=True, text=True)
        assert not check or done.returncode == 0, f"{words}\n{done.stdout}{done.stderr}"
        return done.stdout.strip()


class Job:
    """A job of the cluster, or an element of an array, and its log."""

    def __init__(self, cluster: Cluster, number, log):
        self.cluster, self.number, self.log = cluster, number, log

    def facts(self) -> dict[str, str]:
        """Return the fields of `scontrol show job`: JobState, ExitCode, Restarts ..."""
        words = self.cluster.run("scontrol", "--oneliner", "show", "job", self.number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def poll(self) -> tuple[str, str] | None:
        """Return its state and exit code, such as `75:0` for 75, None before its end."""
        facts = self.facts()
        over = facts["JobState"] in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        return (facts["JobState"], facts["ExitCode"]) if over else None

    def until(self, happened):
        wait_until(happened, self, self.log, interval=0.1)

    def wait(self) -> tuple[str, str]:
        return wait_until(self.poll, self, self.log, interval=0.1)
