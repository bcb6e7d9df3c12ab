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

import numpy as np
import torch
import xxhash
from deepspeed import DeepSpeedEngine
from transformers.modeling_utils import load_state_dict

from zerotrain.checkpoint.zero_state import full_shape, local_parts, split_dimension
from zerotrain.config.schema import Config
from zerotrain.model.hub import weight_files
from zerotrain.runtime.ranks import Ranks

CHUNK = 1 << 22  # Elements that are moved at a time. Their temporary tensors take some 200 MB.


@torch.no_grad()
def spread_masters(engine: DeepSpeedEngine, config: Config, ranks: Ranks) -> None:
    """Move this rank's masters within their cells. The masters of adapters stay. Frozen weights and
    runs in fp32 have no masters.
    """
    files = [] if config.model.from_config else weight_files(config.model.name_or_path)
    stored = {
        name: tensor.flatten()  # mapped from the file, until it is indexed
        for file in files
        for name, tensor in load_state_dict(file).items()
        if tensor.dtype == torch.float32
    }
    for name, p, start, states, _ in local_parts(engine):
        if states["fp32"].dtype == p.dtype or ".lora_" in name:
            continue
        for masters in filter(len, states["fp32"].split(CHUNK)):
            index = np.arange(start, start + len(masters))
            start += len(masters)
            if (dimension := split_dimension(p)) is not None:
                # From the index in this rank's piece to the index in the whole parameter.
                row = np.prod(full_shape(p)[dimension:])
                index += (index // row * (ranks.tensor - 1) + ranks.rank % ranks.tensor) * row
            exact = stored[name][index].to(masters) if name in stored else masters
            points = points_in_cells(masters, exact, index, f"{config.train.seed} {name}", p.dtype)
            masters.copy_(points)


def points_in_cells(
    values: torch.Tensor, exact: torch.Tensor, index: np.ndarray, key: str, dtype: torch.dtype
) -> torch.Tensor:
    """Return a number of each value's cell, float32 [n]: the exact value, or a random point where
    that is the value itself.

    Args:
        values: float32 [n], numbers of the 16-bit `dtype`.
        exact: float32 [n]; the values are `exact` rounded. A number that rounds elsewhere does not
            count.
        index: int64 [n], ascending: which numbers to take from the random sequence of the key.
    """
    first = int(index[0])
    generator = np.random.PCG64(xxhash.xxh3_64_intdigest(key.encode())).advance(first)
    sequence = np.random.Generator(generator).random(index[-1] + 1 - first)
    position = torch.from_numpy(sequence[index - first]).to(values)
    bits = values.to(dtype).view(torch.int16)
    # The magnitudes of 16-bit numbers are ordered like their bits.
    below, above = ((bits + step).view(dtype).float() for step in (-1, 1))
    points = exact.where(exact != values, (values + below + position * (above - below)) / 2)
    # A point on the edge may round to a neighbor. No number is below 0, and none above the largest.
    return points.where(points.to(dtype) == values, values)
