"""The agent that launch.sh and preflight.py start on every host:  python -u -m cluster.agent

Requests arrive as JSON lines on standard input and are answered with JSON lines on standard output.
Once it has a job, the agent reports the state of the host's ranks every few seconds. It ends them
when the launcher is gone: when its input is closed, or when nothing has arrived for
`silence_seconds`, because a cut link closes nothing. It finds the processes of a job by the mark in
their environment and touches nothing else on the host. It imports little, so that it starts
quickly.
"""

import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from checkpoint.run_folder import list_complete
from cluster.rank import MARK, job_folder, write

POLL_SECONDS = 0.1
STALE_SECONDS = 30.0  # a live agent sends a heartbeat at least every 5 s
BEAT = "beat"
"""File in a job's folder with the agent's monotonic clock at its last heartbeat, which all
processes since the machine's start share, and which no step of the wall clock changes.
"""


class Agent:
    """Answers requests and reports the ranks of one host."""

    def __init__(self) -> None:
        self.output_lock = threading.Lock()
        self.report_lock = threading.Lock()
        self.heard_at = time.monotonic()
        self.job: dict[str, Any] | None = None
        self.listener: socket.socket | None = None
        self.closed = False

    def run(self) -> None:
        """Serve until the launcher is gone; then end what is left of the job."""
        print(flush=True)  # ends a line that the shell's start-up file may have left open
        threading.Thread(target=self.read, daemon=True).start()
        beat_at = 0.0
        while not self.closed:
            time.sleep(POLL_SECONDS)
            now = time.monotonic()
            if self.job is None:
                continue
            if now - self.heard_at > self.job["silence_seconds"]:
                break
            if now >= beat_at:
                beat_at = now + self.job["beat_seconds"]
                with suppress(OSError):
                    write(job_folder(self.job["job"]) / BEAT, now)
                self.beat()
        if self.job is not None:
            self.stop({"grace_seconds": self.job["grace_seconds"]})
            self.forget({})

    def read(self) -> None:
        for line in sys.stdin:
            self.heard_at = time.monotonic()
            request = json.loads(line)
            if request["do"] != "ping":
                threading.Thread(target=self.answer, args=(request,), daemon=True).start()
        self.closed = True

    def answer(self, request: dict[str, Any]) -> None:
        try:
            work: Callable[[dict[str, Any]], Any] = getattr(self, request["do"])
            reply = {"reply": request["id"], "value": work(request)}
        except Exception as error:
            text = traceback.format_exc()
            reply = {"reply": request["id"], "error": f"{error}", "traceback": text}
        self.send(reply)

    def beat(self) -> None:
        """Report the state of the ranks. The lock keeps reports in the order of their states."""
        with self.report_lock:
            self.send({"beat": self.ranks()})

    def send(self, message: dict[str, Any]) -> None:
        with self.output_lock:
            try:
                sys.stdout.write(json.dumps(message) + "\n")
                sys.stdout.flush()
            except (OSError, ValueError):  # the launcher is gone
                self.closed = True

    # ----------------------------------------------------------------------------------------------
    # Requests

    def hello(self, request: dict[str, Any]) -> dict[str, Any]:
        """The host's name and addresses."""
        remove_stale_folders()
        return {
            "hostname": os.uname().nodename,
            "addresses": addresses(),
            # set by sshd: client address, client port, our address, our port
            "reached_at": os.environ.get("SSH_CONNECTION", "   ").split(" ")[2],
        }

    def clock(self, request: dict[str, Any]) -> float:
        """Seconds since 1970."""
        return time.time()

    def resolve(self, request: dict[str, Any]) -> list[str]:
        """The addresses that a name resolves to on this host."""
        found = socket.getaddrinfo(request["name"], None, type=socket.SOCK_STREAM)
        return list(dict.fromkeys(str(entry[4][0]) for entry in found))

    def source_address(self, request: dict[str, Any]) -> str:
        """The local address that the kernel uses for traffic to `target`; nothing is sent."""
        family = socket.AF_INET6 if ":" in request["target"] else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((request["target"], 9))
            return probe.getsockname()[0]

    def listen(self, request: dict[str, Any]) -> int:
        """Accept connections on `port`, 0 for a free one, on every interface. Returns the port."""
        self.unlisten(request)
        self.listener = socket.create_server(("", request["port"]), backlog=1024)
        threading.Thread(target=accept_all, args=(self.listener,), daemon=True).start()
        return self.listener.getsockname()[1]

    def unlisten(self, request: dict[str, Any]) -> None:
        """Stop listening."""
        if self.listener is not None:
            self.listener.shutdown(socket.SHUT_RDWR)  # close() alone leaves accept() listening
            self.listener.close()
            self.listener = None

    def connect(self, request: dict[str, Any]) -> list[str | None]:
        """Try to connect to each (address, port) of `targets`. Returns for each one None if a
        connection was made within `timeout_seconds`, otherwise why not.
        """
        answers: list[str | None] = ["no answer"] * len(request["targets"])

        def try_one(i: int, address: str, port: int) -> None:
            try:
                socket.create_connection((address, port), request["timeout_seconds"]).close()
                answers[i] = None
            except OSError as error:
                answers[i] = "timed out" if isinstance(error, TimeoutError) else str(error.strerror)

        threads = [
            threading.Thread(target=try_one, args=(i, *target))
            for i, target in enumerate(request["targets"])
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return answers

    def call(self, request: dict[str, Any]) -> Any:
        """Call a function of cluster/probe.py and return its value. It runs in a separate process,
        because importing torch may crash or print.
        """
        program = (
            "import json, sys; from cluster import probe\n"
            "name, arguments = json.load(sys.stdin)\n"
            "value = getattr(probe, name)(**arguments)\n"
            "print('\\nVALUE', json.dumps(value))"
        )
        finished = subprocess.run(
            [sys.executable, "-c", program],
            input=json.dumps([request["name"], request["arguments"]]),
            env={**os.environ, **request["environment"]},
            capture_output=True,
            text=True,
            timeout=request["timeout_seconds"],
        )
        _, mark, value = finished.stdout.rpartition("\nVALUE ")
        if finished.returncode or not mark:
            lines = finished.stderr.strip().splitlines() or [f"exit code {finished.returncode}"]
            raise RuntimeError(lines[-1])
        return json.loads(value)

    def newest_checkpoint(self, request: dict[str, Any]) -> str | None:
        """Name of the newest complete checkpoint in `folder`; None if there is none."""
        complete = list_complete(Path(request["folder"]))
        return complete[-1].name if complete else None

    def take_job(self, request: dict[str, Any]) -> None:
        """Accept a job: write its command, environment and devices to a folder that only this user
        can read, from which its ranks take them, and start sending reports.
        """
        folder = job_folder(request["job"])
        folder.mkdir(mode=0o700)
        write(folder / BEAT, time.monotonic())
        spec = {name: request[name] for name in ("command", "environment", "slots")}
        path = folder / "job.json"
        path.touch(mode=0o600)
        path.write_text(json.dumps(spec))
        self.job = request

    def adopt(self, request: dict[str, Any]) -> None:
        """Take over a job whose agent is gone."""
        self.job = request

    def report(self, request: dict[str, Any]) -> None:
        """Report the ranks now instead of at the next heartbeat; the reply follows the report."""
        self.beat()

    def signal(self, request: dict[str, Any]) -> int:
        """Send a signal to every rank. Returns the number of ranks."""
        pids = [pid for pid, words in self.processes().items() if self.is_rank(words)]
        for pid in pids:
            send_signal(pid, request["number"])
        return len(pids)

    def stop(self, request: dict[str, Any]) -> dict[str, int]:
        """Send SIGTERM to the ranks and, after `grace_seconds`, SIGKILL to all remaining processes
        of the job. Returns the numbers of processes found, killed and left.
        """
        if self.job is None:
            return {"found": 0, "killed": 0, "left": 0}
        found = self.processes()
        for pid, words in found.items():
            if self.is_rank(words):
                send_signal(pid, signal.SIGTERM)
        deadline = time.monotonic() + request["grace_seconds"]
        while self.processes() and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        killed = 0
        for _ in range(50):  # a process may start another before it is killed
            left = self.processes()
            if not left:
                break
            for pid in left:
                send_signal(pid, signal.SIGKILL)
            killed = max(killed, len(left))
            time.sleep(POLL_SECONDS)
        return {"found": len(found), "killed": killed, "left": len(self.processes())}

    def forget(self, request: dict[str, Any]) -> None:
        """Remove the job's folder with its secrets."""
        if self.job is not None:
            shutil.rmtree(job_folder(self.job["job"]), ignore_errors=True)
            self.job = None

    # ----------------------------------------------------------------------------------------------

    def ranks(self) -> list[dict[str, Any]]:
        """The records of this host's ranks (cluster/rank.py) with the rank's `state`, and with
        `gone` set if rank and supervisor have disappeared without recording an exit code.
        """
        assert self.job is not None
        records = []
        for path in sorted(job_folder(self.job["job"]).glob("rank_?????.json")):
            record = json.loads(path.read_text())
            state = path.with_suffix(".state")
            record["state"] = state.read_text() if state.exists() else "started"
            pids = (record["pid"], record["supervisor"])
            if gone := not any(Path(f"/proc/{pid}").exists() for pid in pids):
                record |= json.loads(path.read_text())  # it may have ended since the first read
            record["gone"] = gone and "exit" not in record
            records.append(record)
        return records

    def processes(self) -> dict[int, list[str]]:
        """The job's processes that this user may see, as pid -> command line."""
        assert self.job is not None
        mark = f"{MARK}={self.job['job']}"
        found = {}
        for folder in Path("/proc").iterdir():
            if not folder.name.isdigit() or int(folder.name) == os.getpid():
                continue
            try:
                words = os.fsdecode((folder / "cmdline").read_bytes()).split("\0")
                environment = (folder / "environ").read_bytes().split(b"\0")
                dead = b"State:\tZ" in (folder / "status").read_bytes()
            except OSError:  # it has just ended, or is another user's
                continue
            if not dead and (mark.encode() in environment or sets_mark(words, mark)):
                found[int(folder.name)] = words
        return found

    def is_rank(self, words: list[str]) -> bool:
        """Whether a command line is that of a rank's supervisor: `python -u cluster/rank.py JOB`.

        Launchers contain the same words in a later position, and must not get the signal:
        DeepSpeed's kills its ranks 30 s after SIGTERM.
        """
        assert self.job is not None
        pairs = itertools.pairwise(words[1:4])
        return any(a.endswith("cluster/rank.py") and b == self.job["job"] for a, b in pairs)


def sets_mark(words: list[str], mark: str) -> bool:
    """Whether a command line is that of the shell in which ssh runs deepspeed's command, `bash -c
    "export A=B; export LAUNCH_JOB=...; ..."`: the mark is not in its own environment.
    """
    if len(words) < 3 or words[1] != "-c":
        return False
    exports = itertools.takewhile(lambda part: part.startswith("export "), words[2].split("; "))
    return f"export {mark}" in exports


def addresses() -> list[list[str]]:
    """[interface, address] pairs of this host, IPv4 and IPv6, except loopback and link-local."""
    import psutil  # takes 30 ms, and only `hello` needs it

    return [
        [name, entry.address]
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6)
        and not entry.address.startswith(("127.", "::1", "fe80:"))
    ]


def remove_stale_folders() -> None:
    """Remove the folders of jobs whose agent was killed: a live agent writes its clock there at
    every heartbeat. Age decides, not the agent's pid: containers of one name may share /dev/shm.
    """
    for folder in job_folder("*").parent.glob(job_folder("*").name):
        with suppress(OSError, ValueError):
            age_seconds = time.monotonic() - float((folder / BEAT).read_text())
            if not 0 <= age_seconds <= STALE_SECONDS:  # negative: of before the machine's start
                shutil.rmtree(folder)


def accept_all(listener: socket.socket) -> None:
    while True:
        try:
            listener.accept()[0].close()
        except OSError:
            return


def send_signal(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


if __name__ == "__main__":
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # from sshd when the link closes; stop() first
    Agent().run()
    os._exit(0)  # threads may still wait in connect()
