"""Seeds and RNG state: train.seed for initialization and the plan, rank_seed for dropout."""

import random
from typing import Any

import numpy as np
import torch
import xxhash


def rank_seed(seed: int, rank: int, global_step: int = 0) -> int:
    """64-bit seed of a rank's dropout from a step on, a hash of all three: in a sum of them, rank 1
    of a seed would have the stream of rank 0 of the next one.
    """
    return xxhash.xxh3_64_intdigest(f"{seed} {rank} {global_step}".encode())


def seed_everything(seed: int) -> None:
    """Seed Python, numpy and torch (CPU and every device)."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # it takes 32 bits
    torch.manual_seed(seed)


def rng_state() -> dict[str, Any]:
    """RNG states of this process as tensors and plain types, which
    `torch.load(weights_only=True)` can read.
    """
    kind, keys, *rest = np.random.get_state()  # weights_only refuses arrays of numpy
    return {
        "python": random.getstate(),
        "numpy": (kind, keys.tolist(), *rest),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
    }


def set_rng_state(state: dict[str, Any]) -> bool:
    """Restore what `rng_state` returned, unless it is of a run on the other kind of device, or of
    other versions of Python, numpy or torch.

    Returns:
        Whether it was restored.
    """
    try:
        if (state["cuda"] is not None) != torch.cuda.is_initialized():
            return False
        random.setstate(state["python"])
        # numpy does not check the position, and would read beyond its 624 words
        if not 0 <= state["numpy"][2] <= 624:
            return False
        np.random.set_state(state["numpy"])
        torch.set_rng_state(state["torch"])
        if state["cuda"] is not None:
            torch.cuda.set_rng_state(state["cuda"])
    except Exception:  # whatever a state of another shape leads to
        return False
    return True
