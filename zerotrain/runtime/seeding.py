"""Seeds and random number generators: train.seed seeds the weights and the plan, rank_seed the
dropout.
"""

import random
from contextlib import suppress
from typing import Any

import numpy as np
import torch
import xxhash


def rank_seed(seed: int, rank: int, global_step: int = 0) -> int:
    """Return the 64-bit seed of a rank's dropout from a step on. It is a hash: with a sum, rank 1
    of one seed would get the random numbers that rank 0 gets with the next seed.
    """
    return xxhash.xxh3_64_intdigest(f"{seed} {rank} {global_step}".encode())


def seed_everything(seed: int) -> None:
    """Seed Python, numpy and torch (CPU and every device)."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # numpy takes 32 bits
    torch.manual_seed(seed)


def rng_state() -> dict[str, Any]:
    """Return the state of torch's generators of this process, which dropout uses. `cuda` is None in
    a run on CPU.
    """
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    return {"torch": torch.get_rng_state(), "cuda": cuda}


def set_rng_state(state: dict[str, Any]) -> None:
    """Restore what `rng_state` returned, which may come from an untrusted file. Ignore a state of
    the other kind of device, or of a version of torch with different generators.
    """
    if (state.get("cuda") is not None) != torch.cuda.is_initialized():
        return
    with suppress(Exception):  # torch raises many kinds for a state of another shape
        torch.set_rng_state(state["torch"])
        if state["cuda"] is not None:
            torch.cuda.set_rng_state(state["cuda"])
