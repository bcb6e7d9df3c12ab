"""Two ranks, of which rank 0 leaves out an all-reduce before one of another size, for
test_collectives.py.
"""

import torch
import torch.distributed as dist

from zerotrain.runtime.hang import HangWatch
from zerotrain.runtime.process_group import process_group


def main(config, dry_run):
    """Fail in the third round: gloo aborts rank 1."""
    with process_group() as ranks:
        watch = HangWatch(600, config.output_dir)
        try:
            for i in range(3):
                dist.broadcast(torch.ones(5), 0)
                if i < 2 or ranks.rank == 1:
                    dist.all_reduce(torch.ones(8))
                dist.all_reduce(torch.ones(16, 2))
        finally:
            watch.close()
