"""Connections to the agents on the hosts (cluster/agent.py), and the choice of the rendezvous."""

import asyncio
import json
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.hostfile import Host
from runtime.errors import UserError

CONNECT_SECONDS = 15
PING_SECONDS = 1.0
TRY_SECONDS = 5  # timeout of a connection between two hosts: firewalls may drop silently
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


class HostError(UserError):
    """A problem with one host. `str(error)` names the host, the problem and what to do."""

    def __init__(self, host: str, problem: str) -> None:
        super().__init__(f"{host}: {problem}")
        self.host, self.problem = host, problem


class RemoteHost:
    """A host with a running agent, as returned by `connect`."""

    def __init__(self, host: Host, process: asyncio.subprocess.Process) -> None:
        self.name, self.slots = host.name, host.slots
        self.process = process
        self.heard_at = time.monotonic()
        self.lost: str | None = None
        """Why the connection to the agent has ended; None while it is open."""
        self.ranks: list[dict[str, Any]] = []
        """The agent's latest report on its ranks; cluster/rank.py describes a record."""
        self.facts: dict[str, Any] = {}
        """The answer to hello."""
        self.noise = ""
        """The last line that was no message: a shell's start-up file may print."""
        self._waiting: dict[int, asyncio.Future] = {}
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._ping())]

    async def ask(self, do: str, seconds: float = 30, **arguments: Any) -> Any:
        """Send a request to the agent and return its answer.

        Raises:
            HostError: the request failed, or there was no answer within `seconds`.
        """
        if self.lost is not None:
            raise HostError(self.name, self.lost)
        number = len(self._waiting)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        self.tell({"do": do, "id": number, **arguments})
        try:
            reply = await asyncio.wait_for(answer, seconds)
        except TimeoutError:
            printed = f"; {explain_noise(self.noise)}" if self.noise else ""
            raise HostError(
                self.name, f"no answer to `{do}` within {seconds:g} s{printed}"
            ) from None
        if "error" in reply:
            raise HostError(self.name, reply["error"])
        return reply["value"]

    def tell(self, message: dict[str, Any]) -> None:
        """Send without waiting, because a cut link must not block launch.sh."""
        if self.lost is None and self.process.stdin is not None:
            with suppress(OSError, RuntimeError):
                self.process.stdin.write((json.dumps(message) + "\n").encode())

    @property
    def silent_seconds(self) -> float:
        return time.monotonic() - self.heard_at

    async def close(self) -> None:
        """Close the agent's input, so that it ends what is left of its job and exits."""
        for task in self._tasks:
            task.cancel()
        if self.process.returncode is None:
            with suppress(OSError, RuntimeError):
                self.process.stdin.close()
            try:
                await asyncio.wait_for(self.process.wait(), 2)
            except TimeoutError:
                self.process.kill()
                await self.process.wait()

    async def _read(self) -> None:
        while line := await self.process.stdout.readline():
            self.heard_at = time.monotonic()
            message = message_of(line)
            if message is None:
                self.noise = line.decode(errors="replace").strip() or self.noise
            elif "beat" in message:
                self.ranks = message["beat"]
            elif not (answer := self._waiting[message["reply"]]).done():
                answer.set_result(message)
        stderr = (await self.process.stderr.read()).decode(errors="replace")
        self.lost = explain_exit(await self.process.wait(), stderr, self.noise)
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(HostError(self.name, self.lost))

    async def _ping(self) -> None:
        while True:
            await asyncio.sleep(PING_SECONDS)
            self.tell({"do": "ping"})


def message_of(line: bytes) -> dict[str, Any] | None:
    """The agent's message in a line of its output; None if it is not one."""
    try:
        message = json.loads(line)
    except ValueError:
        return None
    return message if isinstance(message, dict) and {"beat", "reply"} & message.keys() else None


def explain_noise(line: str) -> str:
    """What to do about a line that is printed before the agent starts."""
    shown = "".join(c if c.isprintable() else "?" for c in line[:80])
    return f"its shell prints `{shown}`: let ~/.bashrc there print only if the shell is interactive"


def explain_exit(code: int, stderr: str, noise: str = "") -> str:
    """Why an agent ended, from the exit code and the last line of stderr of its ssh, or else of
    its stdout.
    """
    last = (stderr.strip().splitlines() or [noise or f"exit code {code}"])[-1]
    if code == 255:
        return (
            f"cannot be reached over ssh ({last}); check that it is up, that its name is right and "
            "that `ssh -o BatchMode=yes` works without a password"
        )
    if code in (1, 126, 127) and ("No such file" in last or "not found" in last):
        return f"{last}; code and Python must be at the same paths on every host"
    return f"its agent exited with code {code} ({last})"


@dataclass(frozen=True)
class Reach:
    """How commands are run on a host: by ssh, or by srun in a SLURM allocation."""

    ssh_args: tuple[str, ...] = ()
    by_srun: bool = False

    def command(self, host: str, script: str) -> list[str]:
        """The command that runs a shell script on a host."""
        if self.by_srun:
            step = ("--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={host}", "--unbuffered")
            return ["srun", *step, "bash", "-c", script]
        return [*self.remote_shell, host, script]

    @property
    def remote_shell(self) -> list[str]:
        """ssh with its options: it never prompts, and gives up after 10 seconds."""
        options = ("-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10")
        return ["ssh", *options, *self.ssh_args]


async def connect(
    host: Host, reach: Reach, folder: Path, python: str = sys.executable
) -> RemoteHost:
    """Start an agent on a host, in `folder` there, and wait for its first answer.

    Raises:
        HostError: the host cannot be reached, or has no code in `folder`.
    """
    script = f"cd {shlex.quote(str(folder))} && exec {shlex.quote(python)} -u -m cluster.agent"
    process = await asyncio.create_subprocess_exec(
        *reach.command(host.name, script),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,  # launch.sh handles the terminal's Ctrl-C
        limit=1 << 24,  # bytes per line: a probe may answer with fingerprints of many files
    )
    remote = RemoteHost(host, process)
    try:
        remote.facts = await remote.ask("hello", seconds=CONNECT_SECONDS)
    except HostError:
        await remote.close()
        raise
    return remote


async def connect_all(
    hosts: Sequence[Host], reach: Reach, folder: Path
) -> tuple[list[RemoteHost], list[HostError]]:
    """Connect to all hosts at once. Returns those that answered, in order, and the errors of the
    others.
    """
    results = await asyncio.gather(
        *(connect(host, reach, folder) for host in hosts), return_exceptions=True
    )
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, HostError):
            raise result
    return (
        [r for r in results if isinstance(r, RemoteHost)],
        [r for r in results if isinstance(r, HostError)],
    )


async def ask_all(
    hosts: Sequence[RemoteHost], do: str, seconds: float = 30, **arguments: Any
) -> list[Any]:
    """Ask all hosts at once. Returns their answers in order, with a HostError for a failed one."""
    return await asyncio.gather(
        *(host.ask(do, seconds, **arguments) for host in hosts), return_exceptions=True
    )


# --------------------------------------------------------------------------------------------------
# Rendezvous


def interfaces_of(variable: str, value: str, host: RemoteHost) -> list[str]:
    """The interfaces of a host that NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME selects.

    For gloo these are names. For NCCL they are prefixes of names; a leading `=` means exact names,
    and a leading `^` excludes (docs.nvidia.com, NCCL environment variables).

    Raises:
        HostError: the host has no such interface with an address.
    """
    existing = list(dict.fromkeys(name for name, _ in host.facts["addresses"]))
    names = value.lstrip("^=").split(",")
    if variable == "GLOO_SOCKET_IFNAME" or value.lstrip("^").startswith("="):
        found = [n for n in existing if n in names]
    else:
        found = [n for n in existing if n.startswith(tuple(names))]
    if value.startswith("^"):
        found = [n for n in existing if n not in found]
    if not found:
        raise HostError(
            host.name,
            f"{variable}={value} names no interface with an address there; it has "
            f"{', '.join(f'{a} on {n}' for n, a in host.facts['addresses']) or 'none at all'}",
        )
    return found


async def choose_rendezvous(
    hosts: Sequence[RemoteHost],
    environment: Mapping[str, str],
    address: str | None,
    port: int | None,
) -> tuple[str, int]:
    """Choose the master address and port, on the first host. Every other host has connected to
    them.

    Args:
        environment: of the job; NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME restrict the choice.
        address: a name or address that the user has given; None to choose one.
        port: a port that the user has given; None for a free one.

    Raises:
        HostError: no address works for all hosts, or the port is in use.
    """
    candidates = await candidate_addresses(hosts, environment, address)
    chosen, port, errors = await try_addresses(hosts, candidates, port)
    if chosen is None:
        raise errors[0]
    return chosen, port


async def candidate_addresses(
    hosts: Sequence[RemoteHost], environment: Mapping[str, str], address: str | None
) -> list[str]:
    """Addresses of the first host on which rank 0 may listen, the most likely one first.

    Raises:
        HostError: there are none, or a host lacks the interface that the environment names.
    """
    first = hosts[0]
    own = [tuple(pair) for pair in first.facts["addresses"]]
    candidates = [a for _, a in own if ":" not in a] + [a for _, a in own if ":" in a]
    for variable in INTERFACE_VARIABLES:
        if value := environment.get(variable):
            for host in hosts:
                allowed = interfaces_of(variable, value, host)
                if host is first:
                    candidates = [a for a in candidates if any((n, a) in own for n in allowed)]
    if address is not None:
        try:
            resolved = await first.ask("resolve", name=address)
        except HostError:
            raise HostError(first.name, f"--master_addr {address} does not resolve there") from None
        candidates = [a for a in resolved if a in {a for _, a in own}]
        if not candidates and not (len(hosts) == 1 and resolved[0].startswith("127.")):
            raise HostError(
                first.name,
                f"rank 0 runs on it, but --master_addr {address} is not one of its addresses "
                f"({', '.join(a for _, a in own)}); omit it, or give one of them",
            )
        candidates = candidates or resolved
    elif first.facts["reached_at"] in candidates:  # the address that ssh used is tried first
        candidates.sort(key=lambda a: a != first.facts["reached_at"])
    if len(hosts) == 1 and not candidates:
        candidates = ["127.0.0.1"]
    if not candidates:
        raise HostError(first.name, "has no address that other hosts could reach")
    return candidates


async def try_addresses(
    hosts: Sequence[RemoteHost], candidates: Sequence[str], port: int | None
) -> tuple[str | None, int, list[HostError]]:
    """Find the first candidate address at which every other host can connect to the first host.

    Returns:
        (address, port, []), or (None, port, errors) if there is none; the errors are those of each
        host at the most likely address.

    Raises:
        HostError: the first host cannot listen on that port.
    """
    first = hosts[0]
    try:
        port = await first.ask("listen", port=port or 0)
    except HostError as error:
        raise HostError(
            first.name,
            f"port {port} cannot be used for --master_port ({error.problem}); "
            "without --master_port a free one is chosen",
        ) from None
    try:
        answers = await ask_all(
            hosts[1:],
            "connect",
            targets=[(a, port) for a in candidates],
            timeout_seconds=TRY_SECONDS,
        )
    finally:
        await first.ask("unlisten")
    for i, candidate in enumerate(candidates):
        if all(isinstance(answer, list) and answer[i] is None for answer in answers):
            return candidate, port, []
    errors = []
    for host, answer in zip(hosts[1:], answers, strict=True):
        if isinstance(answer, HostError):
            errors.append(answer)
        elif isinstance(answer, BaseException):
            raise answer
        elif answer[0] is not None:
            problem = cannot_connect(candidates[0], port, first.name, answer[0])
            errors.append(HostError(host.name, problem))
    return None, port, errors


def cannot_connect(address: str, port: int, host: str, why: str) -> str:
    return (
        f"cannot connect to {address} port {port} on {host} ({why}); if a firewall blocks it, "
        "allow all traffic between the hosts; otherwise select another interface with "
        "NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME"
    )
