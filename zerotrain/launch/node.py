"""The node wrapper: start the ranks of one host, and leave no process behind.

    python -m zerotrain.launch.node --nodes 2 --node_rank 0 --ranks_per_node 8
        --master_addr NODE --master_port PORT train.py ...     SLURM, Kubernetes, SkyPilot
    python -m zerotrain.launch.node                            scripts/launch.sh, over ssh

SIGTERM, SIGUSR1 and SIGINT are forwarded to the ranks, which save and exit. After the first failure
of a rank, the other ranks get SIGTERM and, GRACE_SECONDS later, SIGKILL. The exit code is the code
of the first rank that failed: 2 for a mistake in the input, 75 if preempted and saved, 128 + N for
signal N.

Under launch.sh, the wrapper prints its address and a free port, and reads the job from standard
input. Later lines are names of signals, or LOST. It ends its ranks when its input is closed, or
silent for too long, because a cut link closes nothing. It talks to launch.sh in lines of EVENT and
a JSON object, among the ranks' lines: {"client", "server", "port", "machine"} when it is ready,
{"failed", "code"} when a rank has failed, {"stalled", "watched"} in seconds when this host did not
run.
"""

import argparse
import atexit
import json
import os
import queue
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import psutil

from zerotrain.launch.hostfile import between, machine_id
from zerotrain.runtime.children import LIBC, end_with_parent
from zerotrain.runtime.errors import (
    EXIT_PREEMPTED,
    EnvironmentFailure,
    describe,
    exit_on_error,
)
from zerotrain.runtime.ports import free_port

EVENT = "zerotrain.launch.node: "
POLL_SECONDS = 0.1
# With GRACE_SECONDS and 5 s to kill, a job ends everywhere within a minute after a link was cut.
SILENCE_SECONDS = 36.0
WATCHED_SECONDS = 30.0
STALL_SECONDS = 0.2  # A busy host delays a process that wakes up by less.
STALLED_SHARE = 0.05  # Stalls of a larger share of the time are reported.
GRACE_SECONDS = 15.0  # W&B takes up to 10 s to finish
# Ranks that wait in a collective for a lost host do not react to SIGTERM.
LOST_GRACE_SECONDS = 5.0
LOST = "lost"
FORWARDED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
PR_SET_CHILD_SUBREAPER = 36  # <sys/prctl.h>


def start_rank(command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen:
    """Start a rank in a session of its own, so that a signal to this process's group reaches it
    once. The kernel kills it when this process ends.
    """
    return subprocess.Popen(
        [sys.executable, "-u", *command],
        env=environment,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=end_with_parent,
    )


def run_ranks(job: Mapping, requests: "queue.SimpleQueue[str]") -> int:
    """Run the ranks of this host to their end, and return the host's exit code.

    Args:
        job: command, first_rank and environment: variables to add for the ranks, with
            MASTER_ADDR, MASTER_PORT, WORLD_SIZE and LOCAL_WORLD_SIZE.
        requests: names of signals to forward, LOST if another host is lost, and "close".

    Raises:
        EnvironmentFailure: MASTER_ADDR cannot be reached.
    """
    LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1)  # orphans of ranks become children of this process
    environment = os.environ | job["environment"]
    # The virtual environment's programs come before the system's.
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment.get('PATH', os.defpath)}"
    ranks = int(environment["LOCAL_WORLD_SIZE"])
    if int(environment["WORLD_SIZE"]) > ranks and "GLOO_SOCKET_IFNAME" not in environment:
        interface = interface_towards(environment["MASTER_ADDR"])
        # Gloo's default is the address of the host's own name, often 127.0.1.1.
        if interface != "lo":
            environment["GLOO_SOCKET_IFNAME"] = interface
    environment |= {"RANK": str(job["first_rank"]), "LOCAL_RANK": "0"}
    is_run = Path(*job["command"][:1]).name == "train.py"
    has_copy = is_run and environment.get("BACKUP_URL", "") != ""
    backup = ["-m", "scripts.backup", *job["command"][1:]]
    running = {}
    try:
        if has_copy:
            fetch = {"the fetch of a checkpoint": start_rank([*backup, "--fetch"], environment)}
            if code := wait_for_ranks(fetch, requests):
                return code
        for local_rank in range(ranks):
            rank = job["first_rank"] + local_rank
            variables = {"RANK": str(rank), "LOCAL_RANK": str(local_rank)}
            running[f"rank {rank}"] = start_rank(job["command"], environment | variables)
        if has_copy:
            pid = running[f"rank {job['first_rank']}"].pid
            watcher = start_rank([*backup, "--pid", str(pid)], environment)
        code = wait_for_ranks(running, requests)
        if has_copy and code in (0, EXIT_PREEMPTED):
            # It uploads the last checkpoint. Further signals to stop do not end it.
            while watcher.poll() is None and (
                requests.empty() or requests.get() not in ("close", "SIGKILL")
            ):
                time.sleep(POLL_SECONDS)
        return code
    finally:
        kill_descendants()


def wait_for_ranks(running: dict[str, subprocess.Popen], requests: "queue.SimpleQueue[str]") -> int:
    """Wait for the ranks, forward signals to them, and stop all of them after a failure.

    Args:
        running: the processes by their names in messages.

    Returns:
        The exit code of the first rank that failed, 0 if none did.
    """
    exit_code = 0
    kills_before = memory_kills()
    deadline = float("inf")
    grace = GRACE_SECONDS
    stop = False
    times = [time.monotonic()]
    while running and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
        times.append(time.monotonic())
        if (watched := times[-1] - times[0]) > WATCHED_SECONDS:
            if (stalled := stalled_seconds(times)) > STALLED_SHARE * watched:
                say({"stalled": stalled, "watched": watched})
            del times[:-1]
        for name, process in list(running.items()):
            status = process.poll()
            if status is None:
                continue
            del running[name]
            # A negative status is the signal that ended the rank: 128 + signal, as in a shell.
            code = 128 - status if status < 0 else status
            if code not in (0, EXIT_PREEMPTED) and not stop:
                stop = True
                exit_code = code
                text = f"{name} ended with exit code {code}"
                if status < 0:
                    text += f" ({signal.Signals(-status).name})"
                if status == -signal.SIGKILL:
                    is_memory = memory_kills() > kills_before
                    text += (
                        "; out of memory: the kernel has killed a process, see `dmesg` there"
                        if is_memory
                        else "; the kernel has killed nothing for lack of memory there"
                    )
                say({"failed": text, "code": code})
            exit_code = exit_code or code
        while not requests.empty():
            request = requests.get()
            if request == LOST:
                grace = LOST_GRACE_SECONDS
            elif request == "close":
                stop = True
            else:
                send(running, signal.Signals[request])
        if stop and deadline == float("inf"):
            for name, process in running.items():
                if psutil.Process(process.pid).status() == psutil.STATUS_STOPPED:
                    say({"failed": f"{name} is stopped (SIGSTOP)", "code": 128 + signal.SIGSTOP})
            send(running, signal.SIGTERM)
            deadline = time.monotonic() + grace
    for name in running:
        print(f"{name} has not ended {grace:.0f} s after SIGTERM: killing it", flush=True)
    return exit_code or (128 + signal.SIGKILL if running else 0)


def stalled_seconds(times: Sequence[float]) -> float:
    """Return how long this host did not run this process, as when it was stopped or had no CPU.

    Args:
        times: when the process ran, with pauses of POLL_SECONDS.
    """
    late = [after - before - POLL_SECONDS for before, after in pairwise(times)]
    return sum(seconds for seconds in late if seconds > STALL_SECONDS)


def memory_kills() -> int:
    """Return how many processes the kernel of this host has killed for lack of memory, also of the
    memory of a cgroup.
    """
    counters = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
    return int(counters.get("oom_kill", 0))


def say(event: Mapping) -> None:
    """Print an event in a single call, because ranks print to the same pipe."""
    print(f"\n{EVENT}{json.dumps(event)}", flush=True)


def send(running: Mapping[str, subprocess.Popen], number: signal.Signals) -> None:
    for process in running.values():
        process.send_signal(number)


def kill_descendants() -> None:
    """Kill the processes that the ranks have left. They may start more before they are killed."""
    for _ in range(50):
        left = psutil.Process().children(recursive=True)
        if not left:
            return
        for process in left:
            with suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(left, timeout=POLL_SECONDS)


def interface_towards(address: str) -> str:
    """Return the network interface that the kernel uses for traffic to an address. Sends nothing.

    Raises:
        EnvironmentFailure: the name does not resolve, or no route leads there.
    """
    try:
        family, _, _, _, target = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)
            source = probe.getsockname()[0]
    except OSError as error:
        raise EnvironmentFailure(
            f"--master_addr {address}: {describe(error)}; if it can be reached only later, set "
            "GLOO_SOCKET_IFNAME to the interface that connects the nodes"
        ) from None
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address.split("%")[0] == source for entry in entries):
            return name
    return "lo"


# --------------------------------------------------------------------------------------------------
# Over ssh


def greeting() -> dict:
    """Return this ssh connection's addresses (client, server), a port that is free here, and the
    machine's id.
    """
    client, _, server, _ = os.environ.get("SSH_CONNECTION", "127.0.0.1 0 127.0.0.1 0").split()
    return {"client": client, "server": server, "port": free_port(), "machine": machine_id()}


def read_requests(requests: "queue.SimpleQueue[str]") -> None:
    """Pass on the lines of standard input, and "close" when it is closed or silent.

    launch.sh sends empty lines to show that it is alive.
    """
    while select.select([0], [], [], SILENCE_SECONDS)[0]:
        data = os.read(0, 1 << 16)
        if not data:
            break
        for name in data.decode().split():
            requests.put(name)
    requests.put("close")


def main() -> int:
    requests = queue.SimpleQueue()
    for number in FORWARDED:
        signal.signal(number, lambda number, frame: requests.put(signal.Signals(number).name))
        # Python restores the default handlers at its exit: a late signal must change no exit code.
        atexit.register(signal.signal, number, signal.SIG_IGN)
    if len(sys.argv) == 1:
        say(greeting())
        # Unbuffered: a buffer would hide later lines from read_requests.
        line = sys.stdin.buffer.raw.readline()
        if not line.endswith(b"\n"):
            return 0  # launch.sh could not reach all hosts, or is gone
        job = json.loads(line)
        threading.Thread(target=read_requests, args=(requests,), daemon=True).start()
        return min(run_ranks(job, requests), 254)  # ssh exits with 255 when it loses its host
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    add = parser.add_argument
    add("--nodes", type=between(1, 100_000), required=True)
    add("--node_rank", type=between(0, 99_999), required=True)
    add("--ranks_per_node", type=between(1, 1024), required=True)
    add("--master_addr", required=True, help="address of the first node")
    add("--master_port", type=between(1, 65535), default=29500)
    add("command", nargs=argparse.REMAINDER, help="train.py --config ...")
    arguments = parser.parse_args()
    if arguments.node_rank >= arguments.nodes:
        parser.error(f"--node_rank {arguments.node_rank}: nodes are 0 to {arguments.nodes - 1}")
    ranks = arguments.ranks_per_node
    job = {
        "command": arguments.command,
        "environment": {
            "MASTER_ADDR": arguments.master_addr,
            "MASTER_PORT": str(arguments.master_port),
            "WORLD_SIZE": str(arguments.nodes * ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
        },
        "first_rank": arguments.node_rank * ranks,
    }
    return run_ranks(job, requests)


if __name__ == "__main__":
    sys.exit(exit_on_error(main))
