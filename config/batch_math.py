"""Arithmetic printed at start-up: learning-rate scaling, warm-up steps and model-state memory."""

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from config.schema import TrainConfig

LR_SCALING_POWER = {"sqrt": 0.5, "linear": 1.0}
NF4_BYTES = 4.127 / 8  # 4 bits, and scales of blocks of 64 in 8 bits (arXiv:2305.14314, section 3)


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


def warmup_steps(train: "TrainConfig", mean_batch: float) -> int:
    """Optimizer steps closest to train.warmup_examples or train.warmup_tokens: at least one, or 0
    without warm-up.
    """
    return max(1, math.floor(train.warmup / mean_batch + 0.5)) if train.warmup else 0


def model_state_parts(
    parameters: int,
    world_size: int,
    stage: int,
    precision: str,
    trained: int | None = None,
    quantized: int = 0,
) -> tuple[int, int, int]:
    """Bytes per rank of (weights, gradients, AdamW state).

    Per parameter 2 + 2 + 12 bytes in mixed precision (weight, gradient, fp32 master weight and two
    moments) and 4 + 4 + 8 in fp32. ZeRO partitions the AdamW state from stage 1 on, the gradient
    from 2 and the weight from 3 (Rajbhandari et al. 2019, arXiv:1910.02054, section 5). Of frozen
    parameters there is only the weight.

    Args:
        trained: how many of the parameters are trained; default: all.
        quantized: how many of the others are kept in nf4.
    """
    weight, gradient, optimizer = (4, 4, 8) if precision == "fp32" else (2, 2, 12)
    trained = parameters if trained is None else trained

    def share(size: float, from_stage: int) -> int:
        return math.ceil(size / (world_size if stage >= from_stage else 1))

    weights = weight * (parameters - quantized) + NF4_BYTES * quantized
    return share(weights, 3), share(gradient * trained, 2), share(optimizer * trained, 1)
