"""Keep a copy of a run's checkpoints in object storage, and bring the newest to a new disk.

    python -m scripts.backup --to s3://BUCKET/RUN --config recipes/mine.yaml [--pid PID]
    python -m scripts.backup --to s3://BUCKET/RUN --config recipes/mine.yaml --fetch

The first command uploads each complete checkpoint of output_dir that the bucket lacks. With --pid
it looks for new ones as long as the process PID runs, and once more after that. Meanwhile it
ignores signals to stop: a scheduler sends them to all processes of a job, whose ranks then save. A
failure never ends the run. It is one line, and the next try comes after 4 s, 8 s ... 5 minutes. A
try reads the credentials anew, where the storage's own tools find them. Any flag of train.py may
follow. Without --to, the variable BACKUP_URL is used, which other users of a host cannot read.

    RUN/step_00001000.ID/           one folder for each save; ID has 32 hexadecimal digits
      shards/ ...                   the checkpoint's files, each from one node
      metrics.jsonl, resolved_...   from the run folder
      COMPLETE                      last, when the files of all nodes are there

The variables RANK, WORLD_SIZE and LOCAL_WORLD_SIZE tell which share of the files a node uploads; it
has the shards of the node's own ranks. Without them, the node is the only one. A checkpoint that
the run removes meanwhile is removed from the bucket once all others are complete there. Nothing
else is removed. A checkpoint is skipped if the id in its manifest.json, which a stranger may have
written, does not have the form above, with the checkpoint's own step.

--fetch takes the newest complete save, unless output_dir has it or a newer one. A node takes its
own ranks' shards, or all shards if the number of ranks has changed. The checkpoint appears in
output_dir after its sizes and checksums were compared.
"""

import argparse
import os
import re
import signal
from contextlib import suppress
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

import psutil
from fsspec.core import url_to_fs
from fsspec.implementations.dirfs import DirFileSystem

from zerotrain.checkpoint.manifest import (
    MAX_JSON_BYTES,
    FileEntry,
    find_problems,
    inspect,
    read_manifest,
    stat_inside,
)
from zerotrain.checkpoint.run_folder import (
    COMPLETE,
    MANIFEST,
    METRICS,
    RESOLVED_CONFIG,
    RESOLVED_DS_CONFIG,
    SAVE,
    checkpoints_folder,
    is_shard,
    list_complete,
    refuse_links,
    remove,
)
from zerotrain.config.parse import parse_command_line
from zerotrain.runtime.errors import (
    EnvironmentFailure,
    UserError,
    describe,
    exit_on_error,
    printable,
)
from zerotrain.runtime.files import sync_tree, temporary_name
from zerotrain.runtime.rank_env import rank_variables

WAIT_SECONDS = 2.0
MAX_WAIT_SECONDS = 300.0
IGNORED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
ADVICE = "check that the bucket exists and the credentials are valid"
BESIDE = (METRICS, RESOLVED_CONFIG, RESOLVED_DS_CONFIG)
"""Files of the run folder that a resumed run continues, or `export --verify` reads."""


print_once = cache(print)


def shown(text: str, url: str) -> str:
    """Return a text about a URL, such as an error, without the URL's user name and password."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    text = text.replace(url, parts._replace(netloc=host).geturl())
    return printable(text.replace(parts.password, "***") if parts.password else text)


def save_of(checkpoint: Path) -> str:
    """Return the name of a checkpoint's save, from its manifest; "" if no save has such a name."""
    save_id = read_manifest(checkpoint).save_id
    is_save = re.fullmatch(rf"\.{SAVE}\.tmp", save_id) and save_id[1:-4].startswith(checkpoint.name)
    return save_id[1:-4] if is_save else ""


def open_bucket(url: str) -> DirFileSystem:
    """Return a folder of object storage, reached with the credentials of now."""
    fs, root = url_to_fs(url, skip_instance_cache=True, use_listings_cache=False)
    return DirFileSystem(root, fs)


def is_own(number: int) -> bool:
    """Return whether a file is in this node's share, by its number in the manifest. The number of a
    shard is its rank.
    """
    first, _, world, ranks = map(int, rank_variables().values())
    return first <= number % world < first + ranks


def lacking(bucket: DirFileSystem, save: str, files: dict[str, FileEntry]) -> list[str]:
    """Return the files of a save that are not in the bucket, or have another size there."""
    there = bucket.find(save, detail=True)
    sizes = {path: info["size"] for path, info in there.items()}
    return [name for name, entry in files.items() if sizes.get(f"{save}/{name}") != entry.bytes]


def copy(url: str, run: Path, copied: set[str]) -> str:
    """Upload this node's share of the checkpoints that the bucket lacks, the newest first. Then
    remove from the bucket what the run has removed.

    Args:
        copied: the saves that this process has seen complete in output_dir, and completed in the
            bucket. Only these are ever removed there. It is updated.

    Returns:
        What the bucket lacks of other nodes' shares; "" if nothing.
    """
    local = {}
    for path in reversed(list_complete(checkpoints_folder(run))):
        if save := save_of(path):
            local[save] = path
        else:
            print_once(f"WARNING: {path} is not copied: its manifest.json has the id of no save")
    if not local or local.keys() == copied:
        return ""
    bucket, problem = open_bucket(url), ""
    for save, checkpoint in local.items():
        if save in copied:
            continue
        files = read_manifest(checkpoint).files
        missing = lacking(bucket, save, files)
        for name in BESIDE if missing and is_own(0) else ():
            stat_inside(run, name)  # A link could lead to any file.
            bucket.put_file(str(run / name), f"{save}/{name}")
        # Without a shared disk, other nodes have the files of their ranks.
        here = files.keys() - find_problems(checkpoint, files).keys()
        for number, name in enumerate(files):
            if name in missing and is_own(number) and name in here:
                bucket.put_file(str(checkpoint / name), f"{save}/{name}")
        if missing := lacking(bucket, save, files):
            problem = f"{save} lacks {missing[0]} of another node"
            continue
        for name in (MANIFEST, COMPLETE):
            bucket.put_file(str(checkpoint / name), f"{save}/{name}")
        print(shown(f"backup: {checkpoint} -> {url}", url))
        copied.add(save)
    for save in () if problem else copied - local.keys():
        if is_own(0):
            bucket.rm(save, recursive=True)
        copied.remove(save)
    return problem


def watch(url: str, run: Path, pid: int) -> None:
    """Copy until a process has ended, and once more. Print problems, which never end the run."""
    copied, wait, problem, times = set(), WAIT_SECONDS, "", 0
    is_running = True
    while is_running:
        with suppress(psutil.Error):
            psutil.Process(pid).wait(wait)
        is_running = psutil.pid_exists(pid)
        before, problem = problem, ""
        try:
            lacks = copy(url, run, copied)
            problem = "" if is_running else lacks
        except Exception as error:  # Each backend has its own.
            lacks = problem = describe(error)
        wait = min(2 * wait, MAX_WAIT_SECONDS) if lacks else WAIT_SECONDS
        # Printed the second time, because a checkpoint may be removed while it is read.
        times = times + 1 if problem == before else 0
        if problem and (times == 1 or not is_running):
            then = "it is tried again" if is_running else "repeat it without --pid"
            print(shown(f"WARNING: backup to {url}: {problem}; {ADVICE}; {then}", url))


def fetch(url: str, run: Path) -> None:
    """Bring the newest complete save to output_dir: this node's shards, or all if the number of
    ranks has changed. Do nothing if they, or a newer checkpoint, are there.
    """
    bucket = open_bucket(url)
    complete = [Path(path).parent.name for path in bucket.glob(f"step_*/{COMPLETE}")]
    save = max((name for name in complete if re.fullmatch(SAVE, name)), default=None)
    if save is None:
        print(shown(f"backup: {url} has no complete checkpoint", url))
        return
    target = checkpoints_folder(run) / Path(save).stem
    draft = temporary_name(target)

    def download(*names: str) -> None:
        # Texts, because in a Path a name that begins with / would leave the draft. One file at a
        # time, because s3fs holds 500 MB of each.
        bucket.get(
            [f"{save}/{name}" for name in names],
            [f"{draft}/{name}" for name in names],
            batch_size=1,
        )

    try:
        if bucket.size(f"{save}/{MANIFEST}") > MAX_JSON_BYTES:
            raise OSError(f"{save}/{MANIFEST} has more than {MAX_JSON_BYTES:,} bytes")
        download(MANIFEST)
        manifest = read_manifest(draft)
        files = manifest.files
        if manifest.save_id != f".{save}.tmp":
            raise OSError(f"{save}/{MANIFEST} belongs to another save")
        is_same_world = int(rank_variables()["WORLD_SIZE"]) == sum(map(is_shard, files))
        own = {
            name: entry
            for number, (name, entry) in enumerate(files.items())
            if is_own(number) or not (is_shard(name) and is_same_world)
        }
        for path in list_complete(target.parent):
            save_id, problems = inspect(path)
            is_here = save_id == f".{save}.tmp" and not problems.keys() & own.keys()
            if path >= target and (is_here or not problems):
                return
        for name in lacking(bucket, save, own):
            raise OSError(f"{save}/{name} is missing there, or its size is not the manifest's")
        beside = BESIDE if is_own(0) else ()
        download(*own, COMPLETE, *beside)
        for name, problem in find_problems(draft, own, checksums=True).items():
            raise OSError(f"{save}/{name} {problem}")
        if any(path.is_symlink() for path in (target, *target.rglob("*"))):
            remove(target)
        sync_tree(draft)
        for name in beside:
            if not (run / name).exists():
                os.replace(draft / name, run / name)
        for name in (*own, MANIFEST, COMPLETE):  # A node that shares the disk may be first.
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            os.replace(draft / name, target / name)
    finally:
        remove(draft)
    print(shown(f"backup: {url} -> {target}", url))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    url = os.environ.get("BACKUP_URL")
    text = "folder of this run: s3://, gs:// or hf://; BACKUP_URL without it"
    add("--to", default=url, required=not url, metavar="URL", help=text)
    add("--pid", type=int, metavar="PID", help="process of the run, as in `tail --pid`")
    add("--fetch", action="store_true", help="bring the newest checkpoint to output_dir")
    args, rest = parser.parse_known_args()
    run = Path(parse_command_line(rest, "scripts/backup.py").config.output_dir)
    if args.pid:
        for number in IGNORED:
            signal.signal(number, signal.SIG_IGN)
        return watch(args.to, run, args.pid)
    refuse_links(run)
    try:
        if args.fetch:
            fetch(args.to, run)
        elif problem := copy(args.to, run, set()):
            raise OSError(problem)
    except Exception as error:  # Each backend has its own.
        lacks_package = isinstance(error, ImportError)
        advice = "pip install s3fs, or gcsfs for gs://" if lacks_package else ADVICE
        text = shown(f"--to {args.to}: {describe(error)}; {advice}", args.to)
        if args.fetch and list_complete(checkpoints_folder(run)):
            print(f"WARNING: {text}; the run resumes from what output_dir has")
            return
        raise (UserError if lacks_package else EnvironmentFailure)(text) from error


if __name__ == "__main__":
    exit_on_error(main)
