"""scripts/launch.sh: runs one job on the hosts of a hostfile and returns its exit code.

One ssh connection per host, with the node wrapper (zerotrain/launch/node.py) at its other end. The
wrapper gets command, environment and secrets over its standard input, starts the host's ranks, and
ends them when that input is closed. So a job ends on all hosts when one of them fails or is lost,
and when this process ends, however it ends.
"""

import json
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from zerotrain.launch.hostfile import between, world_size
from zerotrain.launch.job import Job, job_of, job_parser, remote_command
from zerotrain.launch.node import EVENT, FORWARDED, GRACE_SECONDS
from zerotrain.launch.restart import prepare_restart
from zerotrain.runtime.errors import (
    EXIT_FAILURE,
    EXIT_PREEMPTED,
    EXIT_USER_MISTAKE,
    UserError,
    exit_on_error,
)

CONNECT_SECONDS = 20
PING_SECONDS = 1.0
MAX_LINE_BYTES = 1 << 16
MAX_WAITING_LINES = 1000  # of each host, to be printed
ERROR = re.compile(r"(?:\[rank \d+ @ [^]]*\] )?(error: .+|[A-Za-z_][\w.]*(?:Error|Exception)\b.*)")


@dataclass(frozen=True)
class Outcome:
    """How a job ended."""

    code: int
    cause: str = ""
    stopped_by_user: bool = False


class Connection:
    """An ssh connection to the node wrapper on one host. Its lines, and None at its end, arrive in
    `events` as (connection, line).
    """

    def __init__(self, host: str, job: Job, events: queue.SimpleQueue) -> None:
        self.host = host
        self.greeting: dict | None = None
        self.last_line = ""
        self.last_error = ""
        self.room = threading.Semaphore(MAX_WAITING_LINES)
        self.process = subprocess.Popen(
            remote_command(job, host, "zerotrain.launch.node"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C in the terminal reaches launch.sh alone
        )
        threading.Thread(target=self._read, args=(events,), daemon=True).start()

    def _read(self, events: queue.SimpleQueue) -> None:
        # in pieces: a rank may print gigabytes without a line end
        for line in iter(lambda: self.process.stdout.readline(MAX_LINE_BYTES), b""):
            self.room.acquire()
            events.put((self, line.decode(errors="replace").rstrip("\r\n")))
        self.room.acquire()
        events.put((self, None))

    def send(self, text: str) -> None:
        with suppress(OSError, ValueError):  # it has ended, or was closed
            self.process.stdin.write(f"{text}\n".encode())
            self.process.stdin.flush()

    def close(self) -> None:
        """Close the wrapper's input, so that it ends its ranks."""
        with suppress(OSError):
            self.process.stdin.close()


def event_of(line: str) -> dict | None:
    """What a node wrapper says in a line, None for any other line: a rank may print EVENT too."""
    if line.startswith(EVENT):
        with suppress(ValueError, RecursionError):
            match json.loads(line.removeprefix(EVENT)):
                case (
                    {"failed": str(), "code": int()}
                    | {"client": str(), "server": str(), "port": int()}
                ) as event:
                    return event
    return None


class Attempt:
    """One attempt at a job: connects to its hosts, runs it, and ends it on all of them."""

    def __init__(self, job: Job, events: queue.SimpleQueue) -> None:
        self.job = job
        self.events = events
        self.grace_seconds = min(GRACE_SECONDS, job.heartbeat_seconds / 4)
        self.connections = [Connection(host, job, events) for host in job.hosts]
        self.running = set(self.connections)
        self.mistakes = set()  # printed lines that begin with `error: `
        self.failures = []
        """(kind, number, exit code, cause); the lowest is the cause of the others: a host that is
        lost or a rank that is killed before a mistake, a mistake before anything else.
        """
        self.stop_signal = None
        self.has_started = False
        self.next_ping = 0.0

    def run(self) -> Outcome:
        """Run the job to its end.

        Raises:
            UserError: a host cannot be reached.
        """
        deadline = time.monotonic() + CONNECT_SECONDS
        try:
            while self.running and not self.failures:
                self.handle_event(PING_SECONDS)
                if self.has_started:
                    self.ping()
                elif self.stop_signal is not None:
                    return Outcome(128 + self.stop_signal, "stopped", True)
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

    def start_ranks(self) -> None:
        """Send each host its part of the job."""
        self.has_started = True
        first = self.connections[0].greeting
        address = first["server"]
        if address.startswith("127.") and len(self.connections) > 1:
            # launch.sh runs on the first host: its address is the one that the second host sees
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
            part = {
                "command": self.job.command,
                "environment": shared | own,
                "first_rank": first_rank,
                "silence_seconds": 0.6 * self.job.heartbeat_seconds,
                "grace_seconds": self.grace_seconds,
            }
            connection.send(json.dumps(part))
            first_rank += len(devices)

    def ping(self) -> None:
        """Show the wrappers that this process is there."""
        if time.monotonic() > self.next_ping:
            self.next_ping = time.monotonic() + PING_SECONDS
            for connection in self.running:
                connection.send("")

    def handle_event(self, seconds: float) -> None:
        """Wait for a line of a host, the end of a connection, or a signal, and act on it.

        Raises:
            UserError: a host cannot be reached.
        """
        try:
            source, value = self.events.get(timeout=seconds)
        except queue.Empty:
            return
        if source is None:
            self.forward_signal(value)
            return
        source.room.release()
        if source not in self.running or value == "":
            return  # of an earlier start, or nothing
        if value is None:
            self.running.discard(source)
            code = source.process.wait()
            if source.greeting is None:
                raise UserError(
                    f"{source.host}: {source.last_line or 'no answer'}; every host needs an ssh "
                    "login without a password (ssh -o BatchMode=yes), and code and .venv at the "
                    "same paths as here"
                )
            if code == 255 or code < 0:  # ssh itself was killed
                what = "is lost: its ssh connection has ended, or its node wrapper was killed"
                self.fail(0, EXIT_FAILURE, f"{source.host} {what}")
            elif code not in (0, EXIT_PREEMPTED):
                self.fail(2, code, f"{source.host}: {source.last_line}")
        elif event := event_of(value):
            self.handle_said(source, event)
        else:
            source.last_line = value
            if error := ERROR.match(value):
                source.last_error = f": {error[1][:500]}"
                if source.last_error in self.mistakes:
                    return  # every host names it
                if error[1].startswith("error: "):
                    self.mistakes.add(source.last_error)
            print(f"{source.host}: {value}")

    def fail(self, kind: int, code: int, cause: str) -> None:
        self.failures.append((kind, len(self.failures), code, cause))

    def forward_signal(self, number: int) -> None:
        """The ranks save and exit after the first signal, and are killed by a second Ctrl-C. A
        scheduler may send SIGTERM more than once.
        """
        is_second = self.stop_signal is not None
        name = "SIGKILL" if is_second and number == signal.SIGINT else "SIGTERM"
        self.stop_signal = number
        if self.has_started:
            print(f"launch: {signal.Signals(number).name}: sending {name} to all ranks")
            for connection in self.running:
                connection.send(name)

    def handle_said(self, source: Connection, event: dict) -> None:
        """Act on what a wrapper says: that it is ready, or that a rank has failed."""
        if "failed" not in event:
            source.greeting = event
            return
        code, cause = event["code"], f"{source.host}: {event['failed']}"
        print(cause)
        if code > 128:  # by a signal
            self.fail(0, code, cause)
        else:
            self.fail(1 if code == EXIT_USER_MISTAKE else 2, code, cause + source.last_error)

    def end(self) -> Outcome:
        """Stop what is left, and find the cause among the failures that arrive until then."""
        for connection in self.running:
            connection.close()
        deadline = time.monotonic() + self.grace_seconds + 5
        while self.running and time.monotonic() < deadline:
            self.handle_event(0.2)
        stopped = self.stop_signal is not None
        if self.failures:
            *_, code, cause = min(self.failures)
            code = 128 + self.stop_signal if stopped else code
            return Outcome(code, cause, stopped)
        if any(c.process.returncode == EXIT_PREEMPTED for c in self.connections):
            cause = "preempted and saved; the same command resumes"
            return Outcome(EXIT_PREEMPTED, cause, stopped)
        return Outcome(0, "", stopped)


@contextmanager
def signals_as_events(events: queue.SimpleQueue) -> Iterator[threading.Event]:
    """Put (None, number) into `events` for each signal that is to stop the job. The result is set
    by the first.
    """
    stopped = threading.Event()

    def on_signal(number: int, frame: object) -> None:
        stopped.set()
        events.put((None, number))

    before = {number: signal.signal(number, on_signal) for number in FORWARDED}
    try:
        yield stopped
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def launch(job: Job, max_restarts: int = 0, restart_wait_seconds: int = 120) -> Outcome:
    """Run the job, and restart it after a failure, until `max_restarts` restarts in a row have
    produced no new checkpoint.

    Raises:
        UserError: a host cannot be reached at the first start, or no restart is possible.
    """
    events = queue.SimpleQueue()
    now = job
    restarts = 0
    saved = None
    with signals_as_events(events) as stopped:
        while True:
            try:
                outcome = Attempt(now, events).run()
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
            now, saved = prepare_restart(job, restart_wait_seconds, stopped)
            restarts = 1 if saved != before else restarts + 1
            if restarts > max_restarts:
                return outcome
            print(f"launch: restart from {saved or 'the beginning'}")


def main() -> int:
    parser = job_parser("scripts/launch.sh")
    parser.add_argument(
        "--max_restarts",
        type=between(0, 1_000_000),
        default=0,
        metavar="N",
        help="after a failure, restart on the healthy hosts from the last complete checkpoint; "
        "give up after N restarts in a row without a newer one",
    )
    parser.add_argument(
        "--restart_wait_seconds",
        type=between(0, 1_000_000),
        default=120,
        metavar="N",
        help="wait this long for all hosts before a restart without some of them (120)",
    )
    arguments = parser.parse_args()
    job = job_of(arguments)
    for number in FORWARDED:  # after launch(), which receives them: the exit code is final
        signal.signal(number, signal.SIG_IGN)
    return launch(job, arguments.max_restarts, arguments.restart_wait_seconds).code


if __name__ == "__main__":
    sys.exit(exit_on_error(main))
