"""The fp32 master weights with which a run in bf16 or fp16 begins.

DeepSpeed copies them from the 16-bit weights. So each master lies in the middle of its cell: the
fp32 numbers that round to the same 16-bit number. The model computes with the rounded weights, and
sees nothing of the updates of a weight until their sum leaves the cell. In bf16 a weight of 0.1
needs 25 updates of 1e-5. Here each master begins elsewhere in its cell, so that some weights change
with the first update:

- at the number in the model's files, if they are in fp32 and 16 bits cannot hold the number;
- otherwise at a random point of the cell, which depends on the seed, the parameter's name and the
  element's index, but not on the number of ranks, the ZeRO stage or the device.

The 16-bit weights, and so the first loss, stay the same.
"""

from copy import deepcopy
from typing import TypeAlias

import numpy as np
import torch
import xxhash
from deepspeed import DeepSpeedEngine

from zerotrain.checkpoint.zero_state import LocalPart, local_parts, piece_of_whole
from zerotrain.config.schema import Config
from zerotrain.model.stored import fp32_weights
from zerotrain.runtime.ranks import Ranks

CHUNK = {"cpu": 1 << 17, "cuda": 1 << 22}
"""Elements that are moved at a time: on a CPU about as many as its caches hold, on a GPU so many
that starting its kernels takes little of the time. Their temporary tensors take 200 MB there.
"""
MASK = 0xFFFFFFFF
FACTORS = (0x21F0AAAD, 0x735A2D97, 0x2C1B3C6D)
"""Odd numbers below 2^31, so that their product with 32 bits fits into an int64."""


@torch.no_grad()
def spread_masters(engine: DeepSpeedEngine, config: Config, ranks: Ranks) -> None:
    """Move this rank's masters within their cells, on its device. The masters of adapters stay.
    Frozen weights and runs in fp32 have no masters.

    Raises:
        UserError: DeepSpeed does not say how tensor parallelism has split a parameter.
    """
    parts = {
        part.name: part
        for part in local_parts(engine)
        if part.states["fp32"].dtype != part.parameter.dtype and ".lora_" not in part.name
    }
    model = config.model
    if parts and not model.from_config and not model.lora:
        with torch.device("meta"):  # The engine's model may be split, or partitioned.
            skeleton = type(engine.module)(deepcopy(engine.module.config))
        for weights in fp32_weights(skeleton, model.name_or_path):
            for name in parts.keys() & weights.keys():
                _spread(parts.pop(name), weights[name].flatten(), config, ranks)
    for part in parts.values():
        _spread(part, None, config, ranks)


def _spread(part: LocalPart, exact: torch.Tensor | None, config: Config, ranks: Ranks) -> None:
    """Move the masters of one parameter.

    Args:
        exact: the whole parameter in fp32, flattened, if the model's files have it.
    """
    name, p, start, states, _ = part
    device = ranks.device
    piece = piece_of_whole(name, p, ranks)
    for masters in filter(len, states["fp32"].split(CHUNK[device.type])):
        index = range(start, start + len(masters))
        start += len(masters)
        if piece is not None:
            index = piece.whole_index(torch.arange(index.start, index.stop, device=device))
        known = exact
        if exact is not None:
            known = exact[index.start : index.stop] if piece is None else exact[index.cpu()]
            known = known.to(device)
        key = f"{config.train.seed} {name}"
        masters.copy_(points_in_cells(masters.to(device), known, index, key, p.dtype))


def points_in_cells(
    values: torch.Tensor,
    exact: torch.Tensor | None,
    index: range | torch.Tensor,
    key: str,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return a number of each value's cell, float32 [n]: the exact value, or a random point where
    there is none or it is the value itself. CPUs and GPUs give the same bits.

    Args:
        values: float32 [n], numbers of the 16-bit `dtype`.
        exact: float32 [n]; the values are `exact` rounded. A number that rounds elsewhere does not
            count.
        index: n indices: which numbers to take from the random sequence of the key.
    """
    bits = values.to(dtype).view(torch.int16)
    # The magnitudes of 16-bit numbers are ordered like their bits.
    below, above = ((bits + step).view(dtype).float() for step in (-1, 1))
    # Operations of their own: a fused product and sum would round once instead of twice.
    points = above.sub_(below).mul_(random_positions(key, index, values.device))
    points = points.add_(below.add_(values)).mul_(0.5)
    if exact is not None:
        points = exact.where(exact != values, points)
    # A point on the edge may round to a neighbor. No number is below 0, and none above the largest.
    rounded = points.to(dtype).view(torch.int16)
    if not points.is_cpu:
        return points.where(rounded == bits, values)
    # On a CPU `where` would take as much time as all before it.
    np.copyto(points.numpy(), values.numpy(), where=rounded.numpy() != bits.numpy())
    return points


def random_positions(
    key: str, index: range | torch.Tensor, device: torch.device | str
) -> torch.Tensor:
    """Return numbers of the random sequence of a key, float32 [n] in [0, 1): the upper 24 bits of a
    hash of key and index, over 2^24.

    Args:
        index: consecutive indices, or int64 [n] on the device.
    """
    digest = xxhash.xxh3_64_intdigest(key.encode())
    if isinstance(index, torch.Tensor):
        return (_hash(index & MASK, index >> 32, digest) >> 8).float().mul_(2.0**-24)
    high, first = divmod(index.start, 1 << 32)
    left = (1 << 32) - first  # indices with the same upper word
    if len(index) > left:
        halves = (random_positions(key, half, device) for half in (index[:left], index[left:]))
        return torch.cat([*halves])
    if torch.device(device).type == "cpu":  # In numpy's uint32 it takes a third of the time.
        low = np.arange(len(index), dtype=np.uint32)
        low += np.uint32(first)
        bits = torch.from_numpy((_hash(low, high, digest) >> 8).astype(np.float32))
    else:
        low = torch.arange(first, first + len(index), device=device)
        bits = (_hash(low, high, digest) >> 8).float()
    return bits.mul_(2.0**-24)


Words: TypeAlias = np.ndarray | torch.Tensor
"""32-bit words: a uint32 array, or an int64 tensor, in which no word has more than 32 bits."""


def _hash(low: Words, high: Words | int, key: int) -> Words:
    """Return a hash of key and index, whose upper bits are random.

    Args:
        low: the lower words of the index.
        high: the upper words of the index; a number if they are the same.
        key: 64 bits.
    """
    bits = low ^ (high * FACTORS[0] & MASK ^ key & MASK)
    bits ^= bits >> 16
    _times(bits, FACTORS[0])
    bits ^= high ^ key >> 32
    bits ^= bits >> 15
    _times(bits, FACTORS[1])
    bits ^= bits >> 16
    _times(bits, FACTORS[2])
    return bits


def _times(bits: Words, factor: int) -> None:
    """Multiply in place, and keep the lower 32 bits of the products."""
    bits *= factor
    if isinstance(bits, torch.Tensor):
        bits &= MASK
