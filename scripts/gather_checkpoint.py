"""Combine the per-node checkpoints that checkpoint.node_local writes into one ordinary checkpoint,
for scripts/export.py, another world size or another ZeRO stage.

    python scripts/gather_checkpoint.py --hostfile hostfile RUN_OR_CHECKPOINT OUT
    python scripts/gather_checkpoint.py --disks COPIES RUN_OR_CHECKPOINT OUT

RUN_OR_CHECKPOINT is a folder on the hosts: a checkpoint, like runs/mine/checkpoints/step_00000300,
or a run folder, of which the newest checkpoint is taken that is complete on every host. The files
are copied by rsync over ssh and checked against the manifests, by size and checksum. The hosts only
need rsync. COPIES is a folder here with one for each node, a copy of its disk, in which
RUN_OR_CHECKPOINT is; deploy/skypilot.yaml keeps such copies in a bucket.

To resume from OUT, set checkpoint.resume to it; on hosts without a shared disk, copy it to each of
them first: rsync -a OUT/ node-2:OUT/
"""

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from errno import ECONNRESET, EPIPE
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from checkpoint.run_folder import COMPLETE, MANIFEST, STEP, TRAINER_STATE, checkpoints_folder
from cluster.hostfile import read_hostfile, select_hosts
from cluster.hosts import HostError, Reach, explain_exit
from runtime.errors import UserError, exit_on_error
from runtime.files import new_folder

SMALL = (COMPLETE, MANIFEST, TRAINER_STATE)  # the files that describe a per-node checkpoint
AT_ONCE = 16  # hosts that are contacted at the same time
ALIVE_SECONDS = 10  # without an answer from a host; ssh gives up after three times as long
FILE_CODES = (3, 11, 23)  # of rsync: files or folders could not be found, read or written
# If ssh fails, rsync's own exit code is often 12 (the stream ended), so ssh's is printed. rsync
# ends the shell that it started with USR1.
SAY_EXIT_CODE = 'trap "" USR1; "$0" "$@"; code=$?; echo "ssh: exit code $code" >&2; exit $code'


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--hostfile", help="of the run; see hostfile.example")
    where.add_argument("--disks", type=Path, metavar="COPIES", help="in place of hosts")
    parser.add_argument("--include", default="", metavar="SPEC", help="as for scripts/launch.sh")
    parser.add_argument("--exclude", default="", metavar="SPEC", help="as for scripts/launch.sh")
    parser.add_argument("--ssh_args", default="", metavar="ARGS", help='"-F my_ssh_config"')
    parser.add_argument("source", type=Path, metavar="RUN_OR_CHECKPOINT")
    parser.add_argument("out", type=Path, metavar="OUT")
    args = parser.parse_args()
    reach: Reach | Path = args.disks
    if args.disks is not None:
        names = sorted((path.name for path in args.disks.glob("*/")), key=lambda n: (len(n), n))
        if not names:
            raise UserError(f"--disks {args.disks}: it has to hold one folder for each node")
    else:
        hosts = select_hosts(read_hostfile(args.hostfile), args.include, args.exclude)
        names = [host.name for host in hosts]
        reach = Reach(tuple(shlex.split(args.ssh_args)))
        args.source = args.source.absolute()
    if shutil.which("rsync") is None:
        raise UserError("rsync is not installed here: apt install rsync")
    with new_folder(args.out) as draft, TemporaryDirectory() as asked:
        chosen = gather(names, reach, args.source, Path(asked), draft)
    print(f"{chosen} -> {args.out}", flush=True)


def gather(
    hosts: Sequence[str], reach: Reach | Path, source: Path, asked: Path, draft: Path
) -> Path:
    """Fill `draft`, an empty folder, with the checkpoint that the hosts have at `source`.

    Args:
        reach: how the hosts are reached, or the folder with copies of their disks.
        asked: an empty folder for what the hosts say about their checkpoints.

    Returns:
        The checkpoint's folder on the hosts.

    Raises:
        UserError: a host, which is named, is unreachable, or its per-node checkpoint is missing or
            damaged; the files of some ranks are on no host; or the disk has too little space.
    """
    # 1. Fetch the small files that describe the per-node checkpoints of each host.
    is_checkpoint = re.fullmatch(STEP, source.name) is not None
    folder = source.parent if is_checkpoint else checkpoints_folder(source)
    wanted = source.name if is_checkpoint else "step_" + 8 * "[0-9]"
    filters = [f"--include=/{wanted}/", *(f"--include=/{wanted}/{name}" for name in SMALL)]

    def ask(host: str) -> None:
        rsync(reach, host, folder, asked / host, "-r", *filters, "--exclude=*")

    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(ask, hosts))

    from checkpoint.find import format_ranks, joint_problem, node_checkpoints, read_node_checkpoint
    from checkpoint.manifest import Manifest, file_problem, read_manifest

    said = {host: {part.name: read_node_checkpoint(part) for part in (asked / host).iterdir()}
            for host in hosts}  # fmt: skip

    # 2. Choose the newest checkpoint that is complete and the same save on all hosts.
    found = {host: {name: part for name, (part, _) in its.items()} for host, its in said.items()}
    problems = []
    for name in sorted({name for its in found.values() for name in its}, reverse=True):
        problem = joint_problem(node_checkpoints(found, name))
        if problem is None:
            break
        problems.append(f"{folder / name}: {problem}")
    else:
        raise UserError("; ".join(problems) or f"no host has a checkpoint at {source}")
    for problem in problems:
        print(f"skipping {problem}", flush=True)
    parts = [found[host][name] for host in hosts]
    if missing := set(parts[0].missing_ranks).difference(*(part.ranks for part in parts)):
        whose, why = "host of the hostfile", "is it the hostfile of the run?"
        if isinstance(reach, Path):
            whose, why = f"folder in {reach}", "are all nodes there?"
        raise UserError(
            f"{folder / name}: no {whose} has the files of {format_ranks(missing)}; {why}"
        )

    # 3. Fetch each file from the first host that has it, and check it against its manifest.
    files = {}
    plan = {host: {} for host in hosts}
    for host in hosts:
        plan[host] = {f: entry for f, entry in said[host][name][1].items() if f not in files}
        files |= plan[host]
    needed, free = sum(entry.bytes for entry in files.values()), shutil.disk_usage(draft).free
    if free < needed:
        raise UserError(f"{draft.parent}: needs {needed:,} bytes, but the disk has {free:,} free")
    for host in hosts:
        size = sum(entry.bytes for entry in plan[host].values())
        print(f"{host}: {len(plan[host])} files, {size / 2**20:,.1f} MiB", flush=True)
        rsync(reach, host, folder / name, draft, "--files-from=-", stdin="\n".join(plan[host]))
        for file, entry in plan[host].items():
            if problem := file_problem(draft, file, entry, checksums=True):
                raise HostError(host, f"{folder / name}: {problem}")

    # 4. Write one manifest for all files.
    made_by = read_manifest(asked / hosts[0] / name).made_by
    manifest = asdict(Manifest(made_by, dict(sorted(files.items()))))
    (draft / MANIFEST).write_text(json.dumps(manifest, indent=1))
    (draft / COMPLETE).write_text("complete\n")
    return folder / name


def rsync(
    reach: Reach | Path, host: str, there: Path, here: Path, *options: str, stdin: str = ""
) -> None:
    """Copy the contents of a folder on a host to a folder here.

    Raises:
        HostError: names the host and what is wrong there.
        OSError: the folder here cannot be written to.
    """
    if isinstance(reach, Path):
        source = [f"{reach.absolute()}/{host}/{there}/"]
    else:
        # the user's ssh options take precedence; without keep-alives a broken link is not noticed
        ssh = [*reach.remote_shell, "-o", f"ServerAliveInterval={ALIVE_SECONDS}"]
        source = ["-e", shlex.join(["sh", "-c", SAY_EXIT_CODE, *ssh]), f"{host}:{there}/"]
    command = ["rsync", "-ts", *options, *source, f"{here}/"]
    finished = subprocess.run(
        command, input=stdin, capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"}
    )
    if finished.returncode:
        raise rsync_error(host, finished.returncode, finished.stderr)


def rsync_error(host: str, code: int, stderr: str) -> HostError | OSError:
    """Why rsync failed. ssh's exit code tells whether the connection failed, rsync's (`man rsync`)
    whether a file did, and a tag in its message on which side: [sender] is the host, [receiver] and
    [generator] are this machine.
    """
    of_ssh = re.search(r"^ssh: exit code (\d+)$", stderr, re.MULTILINE)
    ssh_code = int(of_ssh[1]) if of_ssh else code
    lines = [line for line in stderr.splitlines() if line and not (of_ssh and line == of_ssh[0])]
    said = [line for line in lines if not line.startswith("rsync")]  # by ssh and its shell
    if ssh_code == 255:
        return HostError(host, explain_exit(255, "\n".join(said)))
    if ssh_code in (126, 127):
        why = (said or [f"exit code {ssh_code}"])[-1]
        return HostError(host, f"rsync cannot be run there ({why}); apt install rsync there")
    lines = [line for line in lines if not line.startswith("rsync error")]
    if code in FILE_CODES:
        if missing := next((line for line in lines if "No such file" in line), None):
            return HostError(host, f"has no per-node checkpoint: {missing}")
        here = re.compile(r"rsync: \[(?:[Rr]eceiver|generator)\] .*\((\d+)\)")
        numbers = [int(match[1]) for match in map(here.fullmatch, lines) if match]
        # a pipe breaks here if the other side ended, which has its own cause
        if number := next((n for n in numbers if n not in (EPIPE, ECONNRESET)), None):
            return OSError(number, os.strerror(number))
    meaning = re.search(r"^rsync error: (.*?) \(code", stderr, re.MULTILINE)
    last = f"{meaning[1]}, exit code {code}" if meaning else f"exit code {code}"
    return HostError(host, f"rsync failed: {'; '.join([*lines[:1], last])}")


if __name__ == "__main__":
    exit_on_error(main)
