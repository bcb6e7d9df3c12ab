"""What a rank has of a parameter."""

import torch
import torch.distributed as dist


def partition(p: torch.Tensor) -> tuple[int, int]:
    """(start, numel) of what this rank has of a flattened parameter: under ZeRO-3 its partition,
    without padding, otherwise the whole one.
    """
    if not hasattr(p, "ds_tensor"):
        return 0, p.numel()
    # Partitions are equally long; the last ones may be partly or wholly padding. Under tensor
    # parallelism the group of a split parameter has the ranks with the same piece.
    size = p.ds_tensor.ds_numel
    start = min(size * dist.get_rank(p.ds_process_group), p.ds_numel)
    return start, min(size, p.ds_numel - start)


def computed_part(p: torch.Tensor) -> torch.Tensor:
    """What this rank has of a flattened parameter, as the model computes with it."""
    return getattr(p, "ds_tensor", p).detach().view(-1)[: partition(p)[1]]
