"""The machine that a run is resolved for, and its devices."""

from contextlib import suppress
from dataclasses import dataclass

import torch

from zerotrain.runtime.ranks import Ranks

GIB = 2**30
PEAK_FLOPS_PER_S = {
    "MIG": None,  # a share of a GPU, such as H100 80GB HBM3 MIG 1g.10gb
    "B200": 2250e12,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "V100": 125e12,
    "MI300X": 1307e12,
}
"""Text in a device's name -> dense FLOP/s in bf16 and fp16, from its data sheet. The first match
counts.
"""


@dataclass(frozen=True)
class Machine:
    """The facts about the machine that resolving a run needs; the same on all ranks."""

    ranks: int
    local_ranks: int
    """Ranks per node."""
    device: str = "cpu"
    """cpu or cuda."""
    precision: str = "fp32"
    """The value of train.precision auto: bf16 on GPUs that support it, fp16 on older ones, fp32 on
    CPU.
    """
    has_varlen: bool = True
    """Whether its GPUs have torch's kernel for packed examples: compute capability 8.0 or more."""


def this_machine(ranks: Ranks) -> Machine:
    """Return the machine that the process group runs on."""
    precision = "fp32"
    has_varlen = True
    if ranks.device.type == "cuda":
        has_varlen = torch.cuda.get_device_capability() >= (8, 0)
        # Emulated bf16, as on V100, is slower than fp16.
        has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        precision = "bf16" if has_bf16 else "fp16"
    return Machine(ranks.world_size, ranks.local_ranks, ranks.device.type, precision, has_varlen)


def device_name(device: torch.device) -> str:
    """Return NVIDIA's name of a GPU, or CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def gpu_health() -> dict[str, float]:
    """Return what NVIDIA's management library (NVML) reports about this rank's GPU; empty if it
    reports nothing.
    """
    with suppress(Exception):  # no GPU, no NVML, or a value that this GPU does not report
        return {
            "temperature_celsius": torch.cuda.temperature(),
            "sm_clock_mhz": torch.cuda.clock_rate(),
            "power_watts": torch.cuda.power_draw() / 1000,
        }
    return {}


def peak_flops_per_s(name: str) -> float | None:
    """Return the peak of dense matrix products in bf16 and fp16; None if it is unknown.

    Args:
        name: of the device.
    """
    peaks = PEAK_FLOPS_PER_S.items()
    return next((peak for text, peak in peaks if text.lower() in name.lower()), None)
