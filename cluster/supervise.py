"""Runs one start of a job: starts the launcher, follows the agents' reports, finds the cause of a
failure and cleans up.
"""

import asyncio
import os
import re
import secrets
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from cluster.environment import environment_of_launcher
from cluster.hostfile import Host, format_hostfile, world_size
from cluster.hosts import HostError, RemoteHost, ask_all, choose_rendezvous, connect
from cluster.job import Ending, Job
from cluster.rank import LAUNCHER_DIED, MARK
from runtime.errors import (
    EXIT_FAILURE,
    EXIT_PREEMPTED,
    EXIT_USER_MISTAKE,
    UserError,
    exit_code_of_signal,
)
from runtime.library_output import LIBRARY_LOGS
from runtime.rank_env import SECRET
from runtime.redact import redactor

POLL_SECONDS = 0.2
RETRY_SECONDS = 5.0
# Fractions of launch.heartbeat_seconds: silence after which a host counts as lost, and the time
# between SIGTERM and SIGKILL for its ranks.
SILENCE_FRACTION, GRACE_FRACTION = 0.4, 0.25
# Wait after the first report of a failure: its consequences may be reported before its cause.
SETTLE_SECONDS = 3.0
LINE_BYTES = 1 << 24  # of the launcher's output
OUTPUT_SECONDS = 5.0  # for the launcher's last output, after it has exited
LAUNCHER_EXIT_SECONDS = 30.0  # for the launcher to exit after all ranks have ended with 0

# The prefix that the launcher adds to a rank's output. mpirun adds it to every chunk that a rank
# writes, also in the middle of a line.
RANK_PREFIX = {
    "openmpi": re.compile(r"\[\d+,(\d+)\]<std(?:out|err)>:"),
    "slurm": re.compile(r"^ *(\d+): "),
}

QUIET_STATES = ("started", "at work")  # they add nothing to "rank 3 exited with code 1"
RANK_SCRIPT = "cluster/rank.py"


def launcher_command(job: Job, folder: Path, address: str, port: int) -> list[str]:
    """The command that starts the ranks: `deepspeed --hostfile ...`, or torchrun on every host.

    `folder` holds the hostfile, which lists only the hosts and slot counts selected by --include
    and --exclude, so that no launcher has to filter.

    Raises:
        UserError: the launcher is not installed, or it needs the same number of ranks on every
            host and the hostfile has different numbers.
    """
    needs = {"openmpi": "mpirun", "slurm": "srun"}.get(job.launcher, "pdsh")
    if shutil.which(needs) is None:
        raise UserError(
            f"--launcher {job.launcher} needs {needs}; install it, or choose another launcher"
        )
    counts = {host.name: len(host.slots) for host in job.hosts}
    if job.launcher in ("slurm", "torchrun") and len(set(counts.values())) > 1:
        slots = ", ".join(f"{name} {count}" for name, count in counts.items())
        raise UserError(
            f"--launcher {job.launcher} needs the same number of slots on every host, not {slots}; "
            "select equal numbers with --include or --exclude, or choose --launcher pdsh"
        )
    ssh_args = shlex.join(job.reach.ssh_args)
    script = [RANK_SCRIPT, job.id]
    if job.launcher == "torchrun":
        script_on_host = (
            f"cd {shlex.quote(str(Path.cwd()))} && {MARK}={job.id} exec {sys.executable} -m "
            f"torch.distributed.run --nnodes {len(counts)} --node_rank %n --nproc_per_node "
            f"{counts[job.hosts[0].name]} --master_addr {address} --master_port {port} "
            f"{shlex.join(script)}"
        )
        return ["pdsh", "-S", "-f", "1024", "-w", ",".join(counts), script_on_host]
    arguments = {
        "pdsh": [],
        "openmpi": [
            "--launcher_args",
            # DeepSpeed would set eth0 for MPI's own traffic, of which there is none
            "--tag-output --bind-to none --mca btl_tcp_if_include lo"
            + (f" --mca plm_rsh_args {shlex.quote(ssh_args)}" if ssh_args else ""),
        ],
        # tasks follow the order of SLURM_HOSTFILE, so that rank 0 is on the first host
        "slurm": ["--launcher_args", f"--label --overlap --nodes {len(job.hosts)} -m arbitrary"],
    }[job.launcher]
    return [
        str(Path(sys.executable).with_name("deepspeed")),
        *("--hostfile", str(folder / "hostfile")),
        *("--master_addr", address, "--master_port", str(port)),
        *("--launcher", job.launcher, *arguments, "--force_multi"),  # a single host is remote too
        *("--no_ssh_check", "--no_local_rank"),
        *("--log_level", "info" if os.environ.get(LIBRARY_LOGS) else "warning"),
        *script,
    ]


async def start_launcher(
    job: Job, folder: Path, address: str, port: int, redact: Callable[[str], str]
) -> asyncio.subprocess.Process:
    """Start the launcher in its own session: on Ctrl-C, DeepSpeed would `pkill` all DeepSpeed jobs
    on the hosts, not only this one.
    """
    command = launcher_command(job, folder, address, port)
    (folder / "hostfile").write_text(format_hostfile(job.hosts))
    by_rank = [host.name for host in job.hosts for _ in host.slots]
    (folder / "slurm_hostfile").write_text("\n".join(by_rank))
    # Only for the launcher's processes on the hosts; the ranks get theirs from the agents.
    variables = {MARK: job.id} | {n: v for n, v in job.environment.items() if n == "DS_ACCELERATOR"}
    (folder / "deepspeed_env").write_text("".join(f"{n}={v}\n" for n, v in variables.items()))
    print(redact(f"launch: {shlex.join(command)}"), flush=True)
    ssh_args = shlex.join(["-o", "BatchMode=yes", "-o", "ConnectTimeout=10", *job.reach.ssh_args])
    return await asyncio.create_subprocess_exec(
        *command,
        env={
            **environment_of_launcher(os.environ),
            "DS_ENV_FILE": str(folder / "deepspeed_env"),
            "PDSH_RCMD_TYPE": "ssh",
            "PDSH_SSH_ARGS_APPEND": ssh_args,
            "SLURM_HOSTFILE": str(folder / "slurm_hostfile"),
            MARK: job.id,
        },
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        limit=LINE_BYTES,
        start_new_session=True,
    )


async def print_output(
    job: Job, launcher: asyncio.subprocess.Process, redact: Callable[[str], str]
) -> None:
    """Print the launcher's output without secrets, and with the host's name as prefix in place of
    the rank's number. pdsh prefixes host names itself.
    """
    names = [host.name for host in job.hosts for _ in host.slots]
    prefix = RANK_PREFIX.get(job.launcher)
    assert launcher.stdout is not None
    while not launcher.stdout.at_eof():
        try:
            text = (await launcher.stdout.readline()).decode(errors="replace")
        except ValueError:  # and the ranks must not wait for a reader
            text = f"launch: a line of over {LINE_BYTES:,} bytes was left out\n"
        if prefix is not None and (rank := prefix.match(text)):
            text = f"{names[int(rank[1])]}: {prefix.sub('', text)}"
        print(redact(text), end="", flush=True)


def find_causes(hosts: Sequence[RemoteHost], silence_seconds: float) -> list[tuple[int, Ending]]:
    """The failures seen so far as (priority, ending), sorted so that a cause comes before its
    consequences on other hosts.
    """
    causes = []
    for host in hosts:
        if host.lost is not None:
            causes.append((0, Ending(EXIT_FAILURE, f"{host.name} is lost: {host.lost}")))
        elif host.silent_seconds > silence_seconds:
            cause = f"{host.name} is lost: no message from it for {host.silent_seconds:.0f} s"
            causes.append((0, Ending(EXIT_FAILURE, cause)))
        for record in host.ranks:
            rank = f"rank {record['rank']} on {host.name}"
            code, received = record.get("exit"), record.get("received")
            if record["gone"]:
                cause = f"{rank} left no exit code: it was killed together with its parent process"
                causes.append((1, Ending(EXIT_FAILURE, cause)))
            elif received == LAUNCHER_DIED:
                cause = f"the launcher on {host.name} was killed; its ranks were preempted"
                causes.append((1, Ending(EXIT_FAILURE, cause)))
            elif code is None or code == 0:
                continue
            elif received:
                cause = f"{rank} was preempted by {received}"
                causes.append((4, Ending(code if code > 0 else EXIT_FAILURE, cause)))
            elif code < 0:
                name = signal.Signals(-code).name
                hint = " (out of memory? check `dmesg` there)" if name == "SIGKILL" else ""
                ending = Ending(exit_code_of_signal(-code), f"{rank} was killed by {name}{hint}")
                causes.append((1, ending))
            else:
                at = f", {record['state']}" if record["state"] not in QUIET_STATES else ""
                causes.append(
                    (2 if code == EXIT_USER_MISTAKE else 3,
                     Ending(code, f"{rank} exited with code {code}{at}"))
                )  # fmt: skip
    return sorted(causes, key=lambda cause: cause[0])


async def watch(
    job: Job,
    hosts: Sequence[RemoteHost],
    launcher: asyncio.subprocess.Process,
    signals: "asyncio.Queue[int]",
) -> Ending:
    """Wait until the job has finished, failed, or been stopped by the user or a scheduler.

    Before deciding, ask every agent for the state of its ranks: the last reports are seconds old,
    and the launcher's exit or a failed rank often arrives before the report of the rank that
    caused it.
    """
    silence_seconds = job.launch.heartbeat_seconds * SILENCE_FRACTION
    expected = world_size(job.hosts)
    failed_at = done_at = stop_requested_at = None
    stop_signal = 0
    reports: dict[str, asyncio.Future] = {}  # why they were asked for -> the agents' answers
    while True:
        await asyncio.sleep(POLL_SECONDS)
        now = time.monotonic()
        records = [record for host in hosts for record in host.ranks]
        done = len(records) == expected and all("exit" in r for r in records)
        succeeded = done and all(r["exit"] == 0 for r in records)
        done_at = done_at or (now if done else None)
        if succeeded and (launcher.returncode is not None or now - done_at > LAUNCHER_EXIT_SECONDS):
            return Ending(0)
        settled = failed_at is not None and now - failed_at > SETTLE_SECONDS
        for why, due in (("ended", launcher.returncode is not None), ("settled", settled)):
            if due and why not in reports:
                reports[why] = asyncio.ensure_future(ask_all(hosts, "report", silence_seconds))
        reported = {why for why, answers in reports.items() if answers.done()}

        while not signals.empty():
            number = signals.get_nowait()
            if stop_requested_at is not None:
                code = exit_code_of_signal(stop_signal)
                return Ending(code, "stopped immediately", stopped_by_user=True)
            stop_signal, stop_requested_at = number, now
            name = signal.Signals(number).name
            print(f"launch: preempted by {name}; the ranks save and exit", flush=True)
            await ask_all(hosts, "signal", seconds=5, number=int(signal.SIGTERM))
        if stop_requested_at is not None:
            if done and all(r["exit"] == EXIT_PREEMPTED for r in records):
                cause = "preempted and saved; the same command resumes"
                return Ending(EXIT_PREEMPTED, cause, stopped_by_user=True)
            # the ranks exit by themselves within the grace time; 10 s more for their reports
            late = now - stop_requested_at > job.launch.preempt_grace_seconds + 10
            if done or "ended" in reported or late:
                return stopped(stop_signal, hosts, silence_seconds)
            continue

        causes = find_causes(hosts, silence_seconds)
        if causes and causes[0][0] == 0:
            return causes[0][1]
        if causes or "ended" in reported:
            failed_at = failed_at or now
        if "settled" in reported or (done and "ended" in reported):
            if causes:
                return causes[0][1]
            code = launcher.returncode or EXIT_FAILURE
            partial = [h.name for h in hosts if len(h.ranks) < len(h.slots)]
            where = f"; not all ranks had started on {', '.join(partial)}" if partial else ""
            cause = f"the launcher exited with code {launcher.returncode} before the ranks{where}"
            return Ending(code, cause)


def stopped(number: int, hosts: Sequence[RemoteHost], silence_seconds: float) -> Ending:
    """The ending of a job that was preempted, but whose ranks are not all known to have saved. Its
    cause says why.
    """
    causes = find_causes(hosts, silence_seconds)
    because = f"; {causes[0][1].cause}" if causes else ""
    cause = f"stopped by {signal.Signals(number).name}{because}"
    return Ending(exit_code_of_signal(number), cause, stopped_by_user=True)


async def run_job(
    job: Job,
    hosts: Sequence[RemoteHost],
    signals: "asyncio.Queue[int]",
) -> Ending:
    """Start the job on connected hosts, watch it until it ends, and clean up after it.

    Raises:
        UserError: the job cannot be started, or no address or port works for all hosts.
    """
    heartbeat_seconds = job.launch.heartbeat_seconds
    address, port = await choose_rendezvous(
        hosts, job.environment, job.master_addr, job.master_port
    )
    environment = {
        **job.environment,
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "LAUNCH_WORLD_SIZE": str(world_size(job.hosts)),
        SECRET: secrets.token_hex(32),
    }
    redact = redactor(os.environ, environment)
    folder = Path(tempfile.mkdtemp(prefix="launch-"))
    launcher = None
    ending = Ending(EXIT_FAILURE)
    try:
        for host in hosts:
            extra = {}
            if "GLOO_SOCKET_IFNAME" not in environment and len(hosts) > 1:
                # gloo's default is the address of the host's own name, on Debian 127.0.1.1
                extra["GLOO_SOCKET_IFNAME"] = await interface_towards(host, hosts[0], address)
            await host.ask(
                "take_job",
                job=job.id,
                command=job.command,
                environment={**environment, **extra},
                slots=list(host.slots),
                beat_seconds=min(5.0, heartbeat_seconds / 20),
                silence_seconds=heartbeat_seconds * SILENCE_FRACTION,
                grace_seconds=heartbeat_seconds * GRACE_FRACTION,
            )
        launcher = await start_launcher(job, folder, address, port, redact)
        printing = asyncio.create_task(print_output(job, launcher, redact))
        ending = await watch(job, hosts, launcher, signals)
        if ending.cause:
            print(f"launch: {ending.cause}; ending the remaining processes of the job", flush=True)
        return ending
    finally:
        over = ending.code == 0 or ending.stopped_by_user
        grace = 0 if over else heartbeat_seconds * GRACE_FRACTION
        await clean_up(job, hosts, launcher, grace)
        if launcher is not None:  # a process that ssh leaves behind may hold the output open
            await asyncio.wait({printing}, timeout=OUTPUT_SECONDS)
            printing.cancel()
        shutil.rmtree(folder, ignore_errors=True)


async def interface_towards(host: RemoteHost, first: RemoteHost, address: str) -> str:
    """The interface through which a host's traffic to the first host goes."""
    own = {a: n for n, a in host.facts["addresses"]}
    used = address if host is first else await host.ask("source_address", target=address)
    return own.get(used, "lo")


def heard(job: Job, hosts: Sequence[RemoteHost]) -> list[RemoteHost]:
    """The hosts that are not lost."""
    silence_seconds = job.launch.heartbeat_seconds * SILENCE_FRACTION
    return [h for h in hosts if h.lost is None and h.silent_seconds < silence_seconds]


async def clean_up(
    job: Job,
    hosts: Sequence[RemoteHost],
    launcher: asyncio.subprocess.Process | None,
    grace_seconds: float,
) -> None:
    """End every process of the job on all hosts that can be reached. On the others the agents do
    so themselves once they have heard nothing for long enough.
    """
    reachable = heard(job, hosts)
    timeout = grace_seconds + 15
    results = await ask_all(reachable, "stop", seconds=timeout, grace_seconds=grace_seconds)
    if launcher is not None and launcher.returncode is None:
        try:  # it exits with the ranks; on SIGTERM it would `pkill` by name on every host
            await asyncio.wait_for(launcher.wait(), 3)
        except TimeoutError:
            with suppress(ProcessLookupError):
                os.killpg(launcher.pid, signal.SIGKILL)
            await launcher.wait()
    for host, result in zip(reachable, results, strict=True):
        if isinstance(result, BaseException):
            print(f"launch: {host.name}: could not be cleaned up: {result}", flush=True)
        elif result["left"]:
            print(f"launch: {host.name}: {result['left']} processes cannot be killed", flush=True)
    await ask_all(reachable, "forget", seconds=5)
    for host in hosts:
        if host.lost is not None:
            await clean_up_with_new_agent(job, host)


async def clean_up_with_new_agent(job: Job, host: RemoteHost) -> None:
    """End the job on a host that has lost its agent but may still be reachable."""
    with suppress(HostError):
        again = await connect(Host(host.name, host.slots), job.reach, Path.cwd())
        arguments = {"silence_seconds": 15, "beat_seconds": 5, "grace_seconds": 0}
        await again.ask("adopt", job=job.id, **arguments)
        await again.ask("stop", seconds=15, grace_seconds=0)
        await again.ask("forget")
        await again.close()
