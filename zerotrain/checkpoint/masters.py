"""The fp32 master weights with which a run in bf16 or fp16 begins.

DeepSpeed makes the masters from the 16-bit weights. So each master lies in the middle of its cell:
the fp32 numbers that round to the same 16-bit number. The model computes with the rounded weights,
and sees nothing of the updates of a weight until their sum leaves the cell. In bf16 a weight of 0.1
needs 25 updates of 1e-5. Here each master begins at a random point of its cell instead, so some
weights change with the first update. The 16-bit weights, and so the first loss, stay the same.

Where the model's files have fp32 numbers, the masters begin with these. docs/bf16.md has the
arithmetic and curves.
"""

import math

import numpy as np
import torch
import xxhash
from deepspeed import DeepSpeedEngine
from transformers.modeling_utils import load_state_dict

from zerotrain.checkpoint.zero_state import full_shape, local_parts, split_dimension
from zerotrain.model.hub import weight_files
from zerotrain.model.load import DTYPES
from zerotrain.runtime.ranks import Ranks
from zerotrain.training.setup import Setup

CHUNK = 1 << 22  # Elements that are moved at a time. Their temporary tensors take some 200 MB.


@torch.no_grad()
def spread_masters(engine: DeepSpeedEngine, setup: Setup, ranks: Ranks) -> None:
    """Move this rank's masters within their cells, if train.masters says so. Frozen weights and
    adapters stay.

    The point depends on the seed, the parameter's name and the element's index: not on the number
    of ranks, the ZeRO stage or the device.
    """
    train, model = setup.config.train, setup.config.model
    if train.masters != "spread" or train.precision == "fp32":
        return
    dtype = DTYPES[train.precision]
    stored = {} if model.from_config else finer_weights(model.name_or_path, dtype)
    for name, p, start, states, _ in local_parts(engine):
        if not (p.requires_grad and len(states["fp32"])) or ".lora_" in name:
            continue
        for masters in states["fp32"].split(CHUNK):
            index = np.arange(start, start + len(masters))
            start += len(masters)
            if (dimension := split_dimension(p)) is not None:  # by tensor parallelism
                row = math.prod(full_shape(p)[dimension:])
                index += (index // row * (ranks.tensor - 1) + ranks.rank % ranks.tensor) * row
            moved = random_points(masters, index, f"{train.seed} {name}", dtype)
            if name in stored:
                exact = stored[name][index].to(masters)
                moved = exact.where(exact.to(dtype) == masters, moved)
            masters.copy_(moved)


def finer_weights(name: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Memory-map the fp32 tensors in a model's files, flattened, by name; {} if, as far as the
    beginning of each tensor shows, all their numbers are numbers of the 16-bit `dtype`.
    """
    found = {
        key: tensor.flatten()
        for file in weight_files(name)
        for key, tensor in load_state_dict(file).items()
        if tensor.dtype == torch.float32
    }
    starts = [tensor[:1000] for tensor in found.values()]
    return found if any((start != start.to(dtype)).any() for start in starts) else {}


def random_points(
    values: torch.Tensor, index: np.ndarray, key: str, dtype: torch.dtype
) -> torch.Tensor:
    """Return a random point of each value's cell, float32 [n].

    Args:
        values: float32 [n], numbers of the 16-bit `dtype`.
        index: int64 [n], ascending: which numbers to take from the random sequence of the key.
    """
    first, last = int(index[0]), int(index[-1])
    generator = np.random.PCG64(xxhash.xxh3_64_intdigest(key.encode())).advance(first)
    sequence = np.random.Generator(generator).random(last + 1 - first)
    position = torch.from_numpy(sequence[index - first]).to(values)
    bits = values.to(dtype).view(torch.int16)
    # The magnitudes of 16-bit numbers are ordered like their bits.
    below, above = ((bits + step).view(dtype).float() for step in (-1, 1))
    points = (values + below + position * (above - below)) / 2
    # A point on the edge may round to a neighbor. No number is below 0, and none above the largest.
    return points.where(points.to(dtype) == values, values)
