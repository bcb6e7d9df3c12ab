"""Four ranks, of which rank 2 leaves out an all-reduce, for test_collectives.py."""

import torch
import torch.distributed as dist

from zerotrain.runtime.hang import HangWatch
from zerotrain.runtime.process_group import process_group


def main(config, dry_run):
    """Hang until killed. Hangs are reported after 9 s."""
    with process_group() as ranks:
        HangWatch(10, config.output_dir).restart()
        for _ in range(3):
            ranks.gather_json(ranks.rank)
            dist.all_reduce(torch.ones(8))
        if ranks.rank != 2:
            dist.all_reduce(torch.ones(16, 2))
        dist.broadcast(torch.ones(5), 0)
