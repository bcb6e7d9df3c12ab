"""The part of a parameter that a rank holds."""

import torch
import torch.distributed as dist


def partition(p: torch.Tensor) -> tuple[int, int]:
    """Return (start, numel) of this rank's part of a flattened parameter.

    Under ZeRO-3 it is the rank's partition without padding, otherwise the whole parameter.
    """
    if not hasattr(p, "ds_tensor"):
        return 0, p.numel()
    # Partitions have equal lengths; the last ones may be partly or wholly padding. Under tensor
    # parallelism, a split parameter's group consists of the ranks that hold the same piece.
    size = p.ds_tensor.ds_numel
    start = min(size * dist.get_rank(p.ds_process_group), p.ds_numel)
    return start, min(size, p.ds_numel - start)


def computed_part(p: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a flattened parameter, in the type that the model computes in."""
    return getattr(p, "ds_tensor", p).detach().view(-1)[: partition(p)[1]]
