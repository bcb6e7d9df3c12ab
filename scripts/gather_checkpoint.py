"""Combine the parts of a checkpoint from nodes without a shared disk, to export it or to resume on
other hosts. Each node has the files of its own ranks.

    python -m scripts.gather_checkpoint --hostfile hostfile RUN_OR_CHECKPOINT OUT
    python -m scripts.gather_checkpoint --disks COPIES RUN_OR_CHECKPOINT OUT

RUN_OR_CHECKPOINT is a folder on the hosts: a checkpoint, like runs/mine/checkpoints/step_00000300,
or a run folder. From a run folder, the newest checkpoint that is complete on every host is taken.
rsync copies the files over ssh; the hosts only need rsync. Sizes and checksums are compared with
the manifests. COPIES is a folder here. It has one folder per node, a copy of the node's disk, and
RUN_OR_CHECKPOINT lies in there.

To resume from OUT, set checkpoint.resume to it. On hosts without a shared disk, copy it to each of
them first: rsync -a OUT/ node-2:OUT/
"""

import argparse
import shlex
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

from zerotrain.launch.hostfile import read_hosts
from zerotrain.launch.job import host_parser, ssh_command
from zerotrain.runtime.errors import UserError, exit_on_error
from zerotrain.tools.new_folder import new_folder


def main() -> None:
    parser = host_parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--disks",
        type=Path,
        metavar="COPIES",
        help="folder with a copy of each node's disk, instead of --hostfile",
    )
    parser.add_argument("source", type=Path, metavar="RUN_OR_CHECKPOINT")
    parser.add_argument("out", type=Path, metavar="OUT")
    args = parser.parse_args()
    if (args.disks is None) == (args.hostfile is None):
        raise UserError("give --hostfile or --disks")
    if shutil.which("rsync") is None:
        raise UserError("rsync is not installed here: apt install rsync")
    if args.disks is not None:
        places = {path.name: f"{path.absolute()}/" for path in sorted(args.disks.glob("*/"))}
        if not places:
            raise UserError(f"--disks {args.disks} has no folders; give a folder with one per node")
        options = []
        source = args.source
    else:
        hosts = read_hosts(args.hostfile, args.include, args.exclude)
        places = {host: f"{host}:" for host in hosts}
        options = ["-e", shlex.join(ssh_command(args.ssh_args))]
        source = args.source.absolute()
    from zerotrain.tools.gather import gather

    with new_folder(args.out) as draft, TemporaryDirectory() as small_files:
        chosen = gather(places, options, source, Path(small_files), draft)
    print(f"{chosen} -> {args.out}")


if __name__ == "__main__":
    exit_on_error(main)
