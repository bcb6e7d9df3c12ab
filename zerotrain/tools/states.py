"""Bytes of a rank's model states: weights, gradients and the optimizer's state, by arithmetic."""

from dataclasses import dataclass
from typing import Any

from torch import nn

from zerotrain.config.ds_config import group_sizes, offload_devices, secondary_ranks, zero_stage
from zerotrain.runtime.machine import GIB
from zerotrain.training.setup import Setup

MOMENTS = 8  # bytes per trained parameter, AdamW's two in fp32
MASTER = 4  # an fp32 copy of each trained weight: ZeRO keeps one even of fp32 weights
NF4_BYTES = 4.127 / 8  # 4 bits, and scales of blocks of 64 in 8 bits (arXiv:2305.14314, section 3)


@dataclass(frozen=True)
class ModelStates:
    """What a rank holds during the whole run, in bytes."""

    on_device: dict[str, float]
    """Bytes of weights, gradients and optimizer in the memory of the GPU."""
    offloaded: dict[str, float]
    """Bytes of those that ZeRO-Offload has moved to CPU memory or NVMe."""
    trained: float
    """The number of trained parameters of which a rank computes gradients."""
    updated: float
    """The number of trained parameters that a rank updates."""

    def __str__(self) -> str:
        parts = [f"{name} {size / GIB:.3g}" for name, size in self.on_device.items()]
        parts += [f"{name} {size / GIB:.3g} offloaded" for name, size in self.offloaded.items()]
        return (
            f"model states {sum(self.on_device.values()) / GIB:.3g} GiB per rank: "
            f"{', '.join(parts)}"
        )


def model_states(setup: Setup) -> ModelStates:
    """The model states of a run with bf16, fp16 or fp32 weights and AdamW."""
    ds_config = setup.ds_config
    skeleton = setup.architecture.skeleton
    counts = setup.architecture.counts
    stage = zero_stage(ds_config)
    tensor_parallel, _ = group_sizes(ds_config)
    ranks = setup.machine.ranks // tensor_parallel  # ZeRO partitions over the groups
    width = weight_bytes(ds_config)
    sums = ds_config.get("data_types", {}).get("grad_accum_dtype")  # over micro-steps
    summed = 4 if sums == "fp32" else width
    linear = {m.weight for m in skeleton.modules() if isinstance(m, nn.Linear)}
    # tensor parallelism is for models trained as a whole, and divides all but the embeddings
    divided = linear.difference(skeleton.get_input_embeddings().parameters())
    elsewhere = (1 - 1 / tensor_parallel) * sum(p.numel() for p in divided)
    total = counts.total - elsewhere
    trained = counts.trained - elsewhere
    updated = trained / ranks if stage >= 1 else trained  # stage 0: every rank updates all
    quantized = 0
    if setup.config.model.quantization:  # the frozen ones in 4 bits, but not the output head
        in_4_bits = linear.difference(skeleton.get_output_embeddings().parameters())
        quantized = sum(p.numel() for p in in_4_bits if not p.requires_grad)

    held = width * (total - quantized) + NF4_BYTES * quantized
    weights = held / (ranks if stage == 3 else 1)
    secondary = secondary_ranks(ds_config)
    if secondary > 1:  # a second partition, over a node's GPUs
        weights += held / secondary
    is_wider = summed != width
    # stage 1's BF16_Optimizer keeps the 16-bit gradients next to their sum in fp32
    gradients = summed + (width if stage < 2 and is_wider else 0)
    states = {
        "weights": weights,
        "gradients": gradients * trained / (ranks if stage >= 2 else 1),
        "optimizer": (MOMENTS + (MASTER if stage or width < 4 else 0)) * updated,
    }
    devices = offload_devices(ds_config)
    moved = {
        "weights": devices["param"] != "none",
        # ZeRO 2 sums 16-bit gradients in fp32 on the GPU, also with offload
        "gradients": devices["optimizer"] != "none" and not (stage == 2 and is_wider),
        "optimizer": devices["optimizer"] != "none",
    }
    offloaded = {name: states.pop(name) for name in moved if moved[name]}
    return ModelStates(states, offloaded, trained, updated)


def weight_bytes(ds_config: dict[str, Any]) -> int:
    """Bytes of a weight: 2 in bf16 and fp16, 4 in fp32."""
    return 2 if ds_config["bf16"]["enabled"] or ds_config["fp16"]["enabled"] else 4
