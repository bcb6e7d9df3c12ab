"""Runs one rank on a host and records how it ended:  python cluster/rank.py JOB

The launcher (deepspeed, torchrun, mpirun, srun) starts this script once per rank. It reads the
command and the environment from the job's private folder, where the agent has put them, runs the
command, and records its exit code there, because no launcher passes exit codes on reliably:
DeepSpeed's exits with 0 when a node launcher was killed. It imports only the standard library,
because one such process stays in memory per rank.
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # started as a script

from runtime.rank_env import rank_variables

PR_SET_PDEATHSIG = 1  # <sys/prctl.h>: the signal that a process gets when its parent dies
LAUNCHER_DIED = "launcher died"  # recorded in place of a signal's name
MARK = "LAUNCH_JOB"  # environment variable with the job's id, set for every process of a job


def job_folder(job: str) -> Path:
    """The private folder of a job on this host, in /dev/shm where possible, because it contains
    secrets. Its name contains the node's, so that hosts with a shared /tmp do not share it.
    """
    memory = Path("/dev/shm")
    root = memory if os.access(memory, os.W_OK) else Path(tempfile.gettempdir())
    # two slurmd may run on one machine
    node = os.environ.get("SLURMD_NODENAME") or os.uname().nodename
    return root / f"launch-{job}-{node}"


def devices_of(slots: Sequence[int], environment: Mapping[str, str]) -> dict[str, str]:
    """CUDA_VISIBLE_DEVICES for the ranks of a host: all of the host's slots, as DeepSpeed's node
    launcher sets it. LOCAL_RANK is a rank's index into them.

    Args:
        slots: device numbers on the host. In a SLURM task they are indices into the devices that
            SLURM has assigned, and nothing is set when they select all of those in order.
        environment: the environment of this process, as the launcher has set it.

    Raises:
        ValueError: the SLURM task has no such device.
    """
    given = environment.get("CUDA_VISIBLE_DEVICES")
    if given is not None and "SLURM_PROCID" in environment and "RANK" not in environment:
        if list(slots) == list(range(len(slots))):
            return {}
        devices = given.split(",")
        if max(slots) >= len(devices):
            raise ValueError(
                f"slot {max(slots)} is selected, but SLURM gives this task CUDA_VISIBLE_DEVICES="
                f"{given}; request more GPUs per node from sbatch or salloc, or exclude that slot"
            )
        return {"CUDA_VISIBLE_DEVICES": ",".join(devices[slot] for slot in slots)}
    return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, slots))}


def die_with_parent(number: int) -> None:
    """Have the kernel send this process a signal when its parent dies."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


def main(job: str) -> int:
    """Run the rank.

    Its record, which the agent reads, has the keys rank; supervisor, the pid of this process; pid,
    that of the rank; received, the name of the first signal that was forwarded to it; exit, its
    exit code, or minus the number of the signal that ended it.

    Returns:
        The exit code of the rank, or 128 + the number of the signal that ended it.
    """
    signals = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # until there is a child to forward to
    die_with_parent(signal.SIGHUP)  # which nothing else sends
    folder = job_folder(job)
    spec = json.loads((folder / "job.json").read_text())
    ranks = rank_variables(os.environ)
    record = folder / f"rank_{int(ranks['RANK']):05d}.json"
    environment = {**os.environ, **spec["environment"], **ranks, MARK: job}
    for name in ("MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES"):
        if name in os.environ:  # the launcher's values win
            environment[name] = os.environ[name]
    environment["PATH"] = f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}"
    environment["LAUNCH_STATE_FILE"] = str(record.with_suffix(".state"))
    facts: dict = {"rank": int(ranks["RANK"]), "supervisor": os.getpid()}
    try:
        environment |= devices_of(spec["slots"], os.environ)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        write(record, facts | {"pid": os.getpid(), "exit": 2})
        return 2

    def forward(number: int, frame: FrameType | None) -> None:
        died = number == signal.SIGHUP
        facts.setdefault("received", LAUNCHER_DIED if died else signal.Signals(number).name)
        write(record, facts)
        child.send_signal(signal.SIGTERM if died else number)

    child = subprocess.Popen(
        [sys.executable, "-u", *spec["command"]],
        env=environment,
        preexec_fn=lambda: (
            signal.pthread_sigmask(signal.SIG_UNBLOCK, signals),
            die_with_parent(signal.SIGTERM),
        ),
    )
    facts["pid"] = child.pid
    write(record, facts)
    for number in signals:
        signal.signal(number, forward)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # launch.sh handles the terminal's Ctrl-C
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
    code = child.wait()
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    facts["exit"] = code
    write(record, facts)
    return code if code >= 0 else 128 - code


def write(path: Path, record: dict | float) -> None:
    """Write a record as JSON, atomically."""
    draft = path.with_suffix(".tmp")
    draft.write_text(json.dumps(record))
    os.replace(draft, path)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
