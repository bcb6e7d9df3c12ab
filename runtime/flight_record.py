"""The last collectives of this rank, for torch's flight recorder."""

import os
import pickle
from pathlib import Path
from tempfile import NamedTemporaryFile

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from runtime.errors import UserError

PREFIX = "rank_"
"""A record's name is this and the rank's number, which NCCL appends to its own."""


def keep_flight_records(folder: Path) -> None:
    """If TORCH_FR_BUFFER_SIZE is set, have this rank's record written to `folder`, by NCCL and by
    write_flight_record. Only this user can write there: a file of another one would be followed if
    it is a link, and fr_trace unpickles, and so executes, whatever it reads.

    Raises:
        UserError: `folder` is a link or a file, or cannot be made private.
    """
    if not _is_on():
        return
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        opened = os.open(folder, os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            os.fchmod(opened, 0o700)
        finally:
            os.close(opened)
    except OSError as error:
        raise UserError(
            f"TORCH_FR_BUFFER_SIZE: flight records cannot be written to {folder} "
            f"({error.strerror}): it must be a folder of this user, not a link; remove it"
        ) from None
    os.environ["TORCH_FR_DUMP_TEMP_FILE"] = str(folder / PREFIX)


def write_flight_record() -> None:
    """If TORCH_FR_BUFFER_SIZE is set, write the last collectives of this rank for torch's
    flight_recorder.fr_trace. NCCL does so by itself on a timeout; gloo only records them.
    """
    if not _is_on():
        return
    record = pickle.loads(torch._C._distributed_c10d._dump_fr_trace())  # made by this process
    record["pg_config"] = {  # fr_trace needs the ranks of each group, which gloo does not record
        name: {
            "name": name,
            "desc": group.group_desc,
            "ranks": str(sorted(c10d._world.pg_group_ranks[group])),
        }
        for group, name in c10d._world.pg_names.items()
    }
    path = Path(os.environ["TORCH_FR_DUMP_TEMP_FILE"] + str(dist.get_rank()))
    with NamedTemporaryFile(dir=path.parent, prefix=".draft_", delete=False) as draft:
        draft.write(pickle.dumps(record))
    os.replace(draft.name, path)  # a link in its place is replaced, not followed


def _is_on() -> bool:
    return int(os.environ.get("TORCH_FR_BUFFER_SIZE", "0")) > 0
