"""Run one job on the hosts of a hostfile and return its exit code (scripts/launch.sh).

Each host gets one ssh connection, with the node wrapper (zerotrain/launch/node.py) at its other
end. The wrapper reads command, environment and secrets from its standard input, starts the host's
ranks, and ends them when that input is closed. The job therefore ends on all hosts when one host
fails or is lost, and when this process ends, however it ends.
"""

import json
import math
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from zerotrain.launch.hostfile import between, refuse_same_machine, world_size
from zerotrain.launch.job import Job, job_of, job_parser, needs_of, remote_command
from zerotrain.launch.node import EVENT, FORWARDED, GRACE_SECONDS, LOST
from zerotrain.launch.restart import choose_hosts
from zerotrain.runtime.errors import (
    EXIT_FAILURE,
    EXIT_PREEMPTED,
    EXIT_USER_MISTAKE,
    UserError,
    exit_on_error,
    printable,
)
from zerotrain.runtime.files import append_line
from zerotrain.tools.launches import note_attempt
from zerotrain.tools.records import STALLS

CONNECT_SECONDS = 20
PING_SECONDS = 1.0
POLL_SECONDS = 0.2
MAX_LINE_BYTES = 1 << 16
MAX_WAITING_LINES = 1000
TRACEBACK = re.compile(r"\[rank \d+ @ [^]]*\] (Traceback \(|  )")
ERROR = re.compile(r"(?:\[rank \d+ @ [^]]*\] )?(error: .+|[A-Za-z_][\w.]*(?:Error|Exception)\b.*)")


@dataclass(frozen=True)
class Outcome:
    """How a job ended."""

    code: int
    cause: str = ""
    stopped_by_user: bool = False
    lost: tuple[str, ...] = ()
    """The hosts that were lost."""


class Connection:
    """An ssh connection to the node wrapper on one host.

    It puts (connection, line) into `lines` for each line that the host prints, and (connection,
    None) at its end.
    """

    def __init__(self, host: str, job: Job, lines: queue.Queue) -> None:
        self.host = host
        self.greeting: dict | None = None
        self.last_line = ""
        self.last_error = ""
        self.process = subprocess.Popen(
            remote_command(job, host, "zerotrain.launch.node"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C in the terminal reaches launch.sh alone
        )
        threading.Thread(target=self._read, args=(lines,), daemon=True).start()

    def _read(self, lines: queue.Queue) -> None:
        # A rank may print gigabytes without a line end: read at most MAX_LINE_BYTES.
        for line in iter(lambda: self.process.stdout.readline(MAX_LINE_BYTES), b""):
            lines.put((self, line.decode(errors="replace").rstrip("\r\n")))
        lines.put((self, None))

    def send(self, text: str) -> None:
        with suppress(OSError, ValueError):  # the connection has ended, or was closed
            self.process.stdin.write(f"{text}\n".encode())
            self.process.stdin.flush()

    def close(self) -> None:
        """Close the wrapper's input, so that it ends its ranks."""
        with suppress(OSError):
            self.process.stdin.close()


def event_of(line: str) -> dict | None:
    """Return what a node wrapper says in a line. None for other lines: a rank may print EVENT."""
    if line.startswith(EVENT):
        with suppress(ValueError, RecursionError):
            match event := json.loads(line.removeprefix(EVENT)):
                case {"failed": str(), "code": int(code)} if 0 < code < 256:
                    return event
                case {"stalled": float(seconds), "watched": float(all_seconds)} if (
                    0 <= seconds <= all_seconds < math.inf
                ):
                    return event
                case {"client": str(), "server": str(), "port": int(), "machine": str()}:
                    return event
    return None


class Attempt:
    """One attempt at a job: connects to its hosts, runs it, and ends it on all of them.

    Args:
        received: the signals to stop that this process has received; it may grow meanwhile.
    """

    def __init__(self, job: Job, received: list[int]) -> None:
        self.job = job
        self.received = received
        self.forwarded = 0
        # A full queue blocks the hosts that print faster than this process does.
        self.lines = queue.Queue(MAX_WAITING_LINES)
        self.connections = [Connection(host, job, self.lines) for host in job.hosts]
        self.running = set(self.connections)
        self.failures = []
        """(kind, number, exit code, cause). The lowest is the cause of the others. Kind 0 is a lost
        host or a killed rank, 1 a user's mistake, 2 anything else.
        """
        self.has_started = False
        self.lost = []
        """The hosts that are lost."""
        self.next_ping = 0.0
        self.times = {"started": time.time()}

    def run(self) -> Outcome:
        """Run the job to its end.

        Raises:
            UserError: a host cannot be reached, or two hosts are the same machine.
        """
        deadline = time.monotonic() + CONNECT_SECONDS
        try:
            while self.running and not self.failures:
                self.handle_line()
                if self.has_started:
                    self.forward_signals()
                    self.ping()
                elif self.received:
                    return Outcome(128 + self.received[-1], "stopped", True)
                elif all(connection.greeting for connection in self.connections):
                    self.start_ranks()
                elif time.monotonic() > deadline:
                    for connection in self.connections:
                        if connection.greeting is None:
                            connection.process.kill()
            return self.end()
        finally:
            for connection in self.connections:
                connection.close()
                if connection in self.running:
                    connection.process.kill()
            if self.job.config is not None and self.has_started:
                _, _, _, cause = min(self.failures, default=("",) * 4)
                note_attempt(Path(self.job.config.output_dir), self.times, cause)

    def start_ranks(self) -> None:
        """Send each host what its ranks need.

        Raises:
            UserError: two hosts are the same machine.
        """
        refuse_same_machine({c.host: c.greeting["machine"] for c in self.connections})
        self.has_started = True
        first = self.connections[0].greeting
        address = first["server"]
        if address.startswith("127.") and len(self.connections) > 1:
            # launch.sh runs on the first host. The second host knows that host's address.
            address = self.connections[1].greeting["client"]
        shared = self.job.environment | {
            "MASTER_ADDR": self.job.master_addr or address,
            "MASTER_PORT": str(first["port"]),
            "WORLD_SIZE": str(world_size(self.job.hosts)),
        }
        first_rank = 0
        for connection in self.connections:
            devices = self.job.hosts[connection.host]
            own = {
                "LOCAL_WORLD_SIZE": str(len(devices)),
                "CUDA_VISIBLE_DEVICES": ",".join(map(str, devices)),
            }
            work = {
                "command": self.job.command,
                "environment": shared | own,
                "first_rank": first_rank,
            }
            connection.send(json.dumps(work))
            first_rank += len(devices)

    def ping(self) -> None:
        """Tell the wrappers once per PING_SECONDS that this process is alive."""
        if time.monotonic() > self.next_ping:
            self.next_ping = time.monotonic() + PING_SECONDS
            for connection in self.running:
                connection.send("")

    def forward_signals(self) -> None:
        """Forward new signals to all ranks.

        After the first signal they save and exit. A second Ctrl-C kills them. A second SIGTERM does
        not, because a scheduler may send it more than once.
        """
        for number in self.received[self.forwarded :]:
            is_kill = self.forwarded > 0 and number == signal.SIGINT
            name = "SIGKILL" if is_kill else "SIGTERM"
            self.forwarded += 1
            print(f"launch: {signal.Signals(number).name}: sending {name} to all ranks")
            for connection in self.running:
                connection.send(name)

    def handle_line(self) -> None:
        """Wait up to POLL_SECONDS for a line from a host, or the end of its connection.

        Raises:
            UserError: a host cannot be reached.
        """
        try:
            source, line = self.lines.get(timeout=POLL_SECONDS)
        except queue.Empty:
            return
        if line is None:
            self.handle_end_of(source)
        elif event := event_of(line):
            self.handle_event(source, event)
        elif line:
            self.times.setdefault("printed", time.time())
            source.last_line = line
            if error := ERROR.match(line):
                source.last_error = f": {error[1][:500]}"
            # After a host was lost, the ranks of the others fail too: their errors are enough.
            is_lost = any(kind == 0 for kind, *_ in self.failures)
            if not (is_lost and TRACEBACK.match(line)):
                print(f"{source.host}: {line}")

    def handle_end_of(self, source: Connection) -> None:
        """Find out why a connection has ended.

        Raises:
            UserError: the host cannot be reached.
        """
        self.running.discard(source)
        code = source.process.wait()
        if source.greeting is None:
            raise UserError(
                f"{source.host}: {source.last_line or 'no answer'}; {needs_of(source.host)}"
            )
        if code == 255 or code < 0:  # ssh lost its host, or was killed
            self.lost.append(source.host)
            what = "is lost: its ssh connection has ended, or its node wrapper was killed"
            self.fail(0, EXIT_FAILURE, f"{source.host} {what}")
        elif code not in (0, EXIT_PREEMPTED):
            self.fail(2, code, f"{source.host}: {source.last_line}")

    def handle_event(self, source: Connection, event: dict) -> None:
        """Note that a wrapper is ready, that its host did not run, or that a rank has failed."""
        if "stalled" in event:
            stalled = event["stalled"]
            print(
                f"launch: {source.host} did not run for {stalled:.1f} of {event['watched']:.0f} s"
            )
            if self.job.config is not None:
                record = {"time": time.time(), "host": source.host, "stalled_seconds": stalled}
                # This machine may not share the run's disk.
                with suppress(OSError):
                    append_line(Path(self.job.config.output_dir, STALLS), record)
            return
        if "failed" not in event:
            source.greeting = event
            return
        code, cause = event["code"], printable(f"{source.host}: {event['failed']}")
        print(cause)
        if code > 128:  # ended by a signal
            self.fail(0, code, cause)
        else:
            self.fail(1 if code == EXIT_USER_MISTAKE else 2, code, cause + source.last_error)

    def fail(self, kind: int, code: int, cause: str) -> None:
        self.times.setdefault("failed", time.time())
        self.failures.append((kind, len(self.failures), code, cause))

    def end(self) -> Outcome:
        """Stop the job on all hosts, and return how it ended."""
        for connection in self.running:
            if self.lost:
                connection.send(LOST)
            connection.close()
        deadline = time.monotonic() + GRACE_SECONDS + 5
        while self.running and time.monotonic() < deadline:
            self.handle_line()
        code, cause = 0, ""
        if self.failures:
            *_, code, cause = min(self.failures)
            code = 128 + self.received[-1] if self.received else code
        elif any(c.process.returncode == EXIT_PREEMPTED for c in self.connections):
            code, cause = EXIT_PREEMPTED, "preempted and saved; the same command resumes"
        return Outcome(code, cause, bool(self.received), tuple(self.lost))


def receive_signals() -> list[int]:
    """Return a list to which each signal to stop is appended from now on. It does nothing else."""
    received = []
    for number in FORWARDED:
        signal.signal(number, lambda number, frame: received.append(number))
    return received


def launch(
    job: Job, nodes: int | None = None, max_restarts: int = 0, restart_wait_seconds: int = 120
) -> Outcome:
    """Run the job, restart it after failures, and return how it ended.

    It is not restarted after `max_restarts` restarts in a row without a new checkpoint. From now on
    this process forwards signals to stop to the job, and does not end by them.

    Args:
        nodes: how many hosts to use; the others are spare. None: all.

    Raises:
        UserError: a host cannot be reached at the first start, or two hosts are the same machine.
        RunFailed: there are too few healthy hosts.
    """
    now = job
    chosen = [*job.hosts][:nodes]
    restarts = 0
    saved = None
    received = receive_signals()
    if len(chosen) < len(job.hosts):
        now, _ = choose_hosts(job, chosen, restart_wait_seconds, received)
    while True:
        try:
            outcome = Attempt(now, received).run()
        except UserError as error:
            if restarts == 0:
                raise
            outcome = Outcome(EXIT_FAILURE, str(error))
        if outcome.cause:
            print(f"launch: {outcome.cause} (exit code {outcome.code})", file=sys.stderr)
        is_over = outcome.stopped_by_user or outcome.code in (0, EXIT_USER_MISTAKE)
        if is_over or max_restarts == 0:
            return outcome
        before = saved
        now, saved = choose_hosts(job, chosen, restart_wait_seconds, received, outcome.lost)
        restarts = 1 if saved != before else restarts + 1
        if restarts > max_restarts:
            return outcome
        print(f"launch: restart from {saved or 'the beginning'}")


def check_spares(job: Job, nodes: int | None) -> None:
    """Raise UserError if the hostfile has fewer hosts than `nodes`, or hosts that differ."""
    slots = {len(devices) for devices in job.hosts.values()}
    if nodes and (nodes > len(job.hosts) or len(slots) > 1):
        raise UserError(
            f"--nodes {nodes}: list at least {nodes} hosts in the hostfile, with the same number "
            "of slots, so that a spare host takes as many ranks as a lost one had"
        )


def main() -> int:
    parser = job_parser("scripts/launch.sh")
    parser.add_argument(
        "--max_restarts",
        type=between(0, 1_000_000),
        default=0,
        metavar="N",
        help="give up after this many restarts in a row without a new checkpoint (0: no restart). "
        "A restart uses the healthy hosts and the last complete checkpoint",
    )
    parser.add_argument(
        "--restart_wait_seconds",
        type=between(0, 1_000_000),
        default=120,
        metavar="N",
        help="seconds to wait for all hosts before a restart on the healthy ones (120)",
    )
    parser.add_argument(
        "--nodes",
        type=between(1, 100_000),
        metavar="N",
        help="use N hosts; the others in the hostfile are spare, and one replaces a lost host "
        "(default: use all)",
    )
    arguments = parser.parse_args()
    job = job_of(arguments)
    check_spares(job, arguments.nodes)
    code = launch(job, arguments.nodes, arguments.max_restarts, arguments.restart_wait_seconds).code
    for number in FORWARDED:  # while Python shuts down, a signal must not change the exit code
        signal.signal(number, signal.SIG_IGN)
    return code


if __name__ == "__main__":
    sys.exit(exit_on_error(main))
