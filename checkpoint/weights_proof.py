"""Proof, before the first step, that the ranks hold the weights of the pretrained files.

The weights reach the ranks through transformers' loader, ZeRO's partitioning, broadcasts and copies
in fp32. Here every tensor is read from the files a second time, and its checksum compared with that
of what the ranks hold: the weights that the model computes with, and the fp32 weights that the
optimizer updates. Each rank reads 1/W of the files.
"""

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from checkpoint.shards import Fragment, flat_weights, is_on_nvme, layout, partition
from config.schema import Config
from model.stored import WRAPPERS, StoredWeights
from runtime.agreement import run_on_all_ranks
from runtime.errors import AgreedError, some
from runtime.process_group import Ranks

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

CHUNK = 1 << 18  # elements, which stay in a core's cache: 10 times as fast as 1 << 22 on CPU


def checksum(values: torch.Tensor, start: int = 0) -> int:
    """Sum of the elements' bits in fp32, each times its odd weight 2i + 1, modulo 2**64.

    The checksum of a tensor is the sum of those of its parts, wherever they lie, which a checksum
    of bytes would not be. It does not depend on the precision that holds the values. It differs if
    one element differs, or if two different ones are exchanged.

    Args:
        values: a tensor of floating point numbers.
        start: i of its first element.
    """
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    steps = 2 * torch.arange(min(CHUNK, values.numel()), device=values.device) + 1
    flat = values.detach().reshape(-1)
    for at in range(0, flat.numel(), CHUNK):
        bits = flat[at : at + CHUNK].float().view(torch.int32).long()
        total += (bits * steps[: len(bits)]).sum() + bits.sum() * (2 * (start + at))
    return int(total)


@torch.no_grad()
def prove_weights(engine: "DeepSpeedEngine", config: Config, ranks: Ranks) -> str:
    """Compare what all ranks hold with the pretrained files; called by all ranks.

    Returns:
        A line that says what was compared.

    Raises:
        UserError: names the tensors that differ.
    """
    if is_on_nvme(engine):
        return "not compared with the files: offload to NVMe keeps them out of memory"
    began = time.perf_counter()
    tensors = _floating_tensors(engine.module)
    names = list(tensors)
    numbers = {name: i for i, name in enumerate(names)}
    plain: dict[str, list[int]] = {}
    for name, i in numbers.items():
        plain.setdefault(WRAPPERS.sub("", name), []).append(i)
    held = _held(tensors), _updated(engine, numbers)

    name, revision = config.model.name_or_path, config.model.revision
    stored = run_on_all_ranks(ranks, lambda: StoredWeights(name, revision))
    expected, found = torch.zeros(2, len(names), dtype=torch.int64)
    for key, value in stored.expected(engine.module, slice(ranks.rank, None, ranks.world_size)):
        for i in plain.get(key, ()):  # of tied weights only the first
            expected[i], found[i] = checksum(value.to(tensors[names[i]].dtype)), 1
    for vector in (expected, found):
        dist.all_reduce(vector, group=ranks.control)

    differs = torch.zeros(len(names), dtype=torch.int64)
    for checksums, kinds in held:
        total = checksums.clone()
        dist.all_reduce(total, group=ranks.control)
        total = torch.where(kinds == PART, total, checksums)
        differs |= (total != expected) & (found > 0) & (kinds != ABSENT)
    dist.all_reduce(differs, dist.ReduceOp.MAX, group=ranks.control)
    if wrong := [name for name, flag in zip(names, differs.tolist(), strict=True) if flag]:
        raise AgreedError(
            f"model.name_or_path: {name}: {len(wrong):,} tensors on the ranks "
            f"differ from those in its files: {some(wrong)}; start again, and check memory and "
            "disk if it happens twice"
        )
    left = [name for name, i in numbers.items() if not found[i] and ".lora_" not in name]
    seconds = time.perf_counter() - began
    return (
        f"{int(found.sum()):,} tensors on {ranks.world_size:,} ranks equal the "
        f"{stored.bytes / 2**30:,.2f} GiB of files (checksums, {seconds:.1f} s)"
    ) + (f"; not in the files: {some(left)}" if left else "")


ABSENT, WHOLE, PART = range(3)
"""What a rank holds of a tensor: nothing that is compared, all of it, or a part."""


def _held(tensors: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Of what this rank computes with: the checksum of each tensor, int64, and its kind."""
    checksums, kinds = [], []
    for tensor in tensors.values():
        start, kind = 0, WHOLE
        if hasattr(tensor, "ds_tensor"):  # ZeRO-3
            start, numel = partition(tensor)
            tensor, kind = tensor.ds_tensor.view(-1)[:numel], PART
        checksums.append(checksum(tensor, start))
        kinds.append(kind)
    return torch.tensor(checksums), torch.tensor(kinds)


def _updated(
    engine: "DeepSpeedEngine", numbers: Mapping[str, int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same of the fp32 weights that this rank's optimizer updates; ABSENT for frozen ones."""
    checksums, kinds = torch.zeros(2, len(numbers), dtype=torch.int64)
    for name, p in engine.module.named_parameters():
        if p.requires_grad:
            kinds[numbers[name]] = PART if engine.zero_optimization_stage() else WHOLE
    flats = flat_weights(engine)
    for at in (Fragment(*values) for values in layout(engine)["fragments"]):
        values = flats[at.flat].view(-1)[at.offset : at.offset + at.numel]
        checksums[numbers[at.name]] += checksum(values, at.start)
    return checksums, kinds


def _floating_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters, each under one name, and persistent buffers."""
    persistent = model.state_dict()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in persistent}
    tensors = {**dict(model.named_parameters()), **buffers}
    return {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}
