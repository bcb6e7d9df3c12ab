"""Two ranks on gloo whose shutdown waits for the other ranks, as NCCL's does, for test_runtime.py.
Rank 1 fails, alone or together with rank 0.
"""

import os

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from zerotrain.runtime.errors import AgreedError, EnvironmentFailure
from zerotrain.runtime.process_group import process_group


def full_disk():
    raise EnvironmentFailure("/disk: no room")


def main(_config, _dry_run):
    """Open the process group as on GPUs, and fail as FAILS says."""
    deepspeed.ops.__compatible_ops__ = {}
    accelerator = get_accelerator()
    accelerator.device_name = lambda *_: "cuda"
    accelerator.device_count = lambda: 2
    accelerator.set_device = lambda _: None
    accelerator.communication_backend_name = lambda: "nccl"
    accelerator.current_device_name = lambda: "cpu"
    init, destroy = dist.init_process_group, dist.destroy_process_group

    def destroy_together(group=None):
        if group is None:
            dist.barrier()
        destroy()  # all groups: NCCL would leave some, but gloo aborts with them

    dist.init_process_group = lambda _, **options: init("gloo", **options)
    dist.destroy_process_group = destroy_together
    with process_group(timeout_seconds=60) as ranks:
        if os.environ["FAILS"] == "together":
            raise AgreedError("on all ranks")
        if os.environ["FAILS"] == "disk":
            ranks.run_on_all(full_disk)
        if ranks.rank == 1:
            raise ValueError("on this one")
        ranks.sum(torch.ones(1))
