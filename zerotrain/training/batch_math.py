"""Arithmetic printed at start-up: learning-rate scaling and warm-up steps."""

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zerotrain.config.schema import TrainConfig

LR_SCALING_POWER = {"sqrt": 0.5, "linear": 1.0}


def scaled_learning_rate(train: "TrainConfig", mean_batch: float) -> float:
    """learning_rate * (mean batch / reference global batch) ** p.

    p = 1 is the linear rule for SGD (Goyal et al. 2017, arXiv:1706.02677), p = 0.5 the square-root
    rule for Adam (Malladi et al. 2022, arXiv:2205.10287), and p = 0 applies no scaling.

    Args:
        mean_batch: DataPlan.mean_batch, in examples or tokens, as the reference global batch.
    """
    if train.lr_scaling == "none":
        return train.learning_rate
    scale = mean_batch / train.reference_global_batch
    return train.learning_rate * scale ** LR_SCALING_POWER[train.lr_scaling]


def warmup_steps(train: "TrainConfig", mean_examples: float) -> int:
    """Optimizer steps closest to train.warmup_examples: at least one, or 0 without warm-up."""
    if not train.warmup_examples:
        return 0
    return max(1, math.floor(train.warmup_examples / mean_examples + 0.5))
