"""A job of two ranks, and a process that was not invited, for tests/test_rendezvous.py. It joins as
rank 1, as torch.distributed does, and sends a pickle that writes a file when it is read.
"""

import os
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

import train
from config.schema import Config

FIRST_KEY = "0//cpu"  # of those under which gloo's ranks write their addresses


class Payload:
    def __reduce__(self):
        return exec, ("import os; open(os.environ['RAN_BY'] + os.environ['RANK'], 'w')",)


def join_as_rank_1() -> None:
    place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(*place, wait_for_workers=False)
    with suppress(dist.DistError):  # where torch's env:// counts those that have come
        dist.TCPStore(*place, world_size=2, timeout=timedelta(seconds=1))
    while not (keys := [key for key in store.list_keys() if FIRST_KEY in key]):
        time.sleep(0.01)
    if prefix := keys[0].split(FIRST_KEY)[0].strip("/"):
        store = dist.PrefixStore(prefix, store)
    timeout = timedelta(seconds=3)
    dist.init_process_group("gloo", store=store, rank=1, world_size=2, timeout=timeout)
    dist.all_gather_object([None, None], Payload(), group=dist.new_group(backend="gloo"))


def main(config: Config, dry_run: bool) -> None:
    """Rank 2 is the uninvited process. If INVITED is set, rank 1 comes after it, else never."""
    done = Path(os.environ["RAN_BY"] + "done")
    rank = int(os.environ["RANK"])
    os.environ.update(WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    if rank == 2:
        os.environ["RANK"] = "1"
        with suppress(Exception):
            join_as_rank_1()
        done.touch()
    elif rank == 0 or "INVITED" in os.environ:
        while rank == 1 and not done.exists():
            time.sleep(0.01)
        train.main(config, dry_run)
