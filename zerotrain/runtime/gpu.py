"""What devices are called, and how fast they can be."""

import torch

PEAK_TFLOPS = {
    "B200": 2250.0,
    "H200 NVL": 835.0,
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "A100": 312.0,
    "L40S": 362.0,
    "V100": 125.0,
    "MI300X": 1307.0,
}
"""Part of a device's name: dense TFLOP/s in bf16 and fp16 of its data sheet. The first entry that
is in the name counts.
"""


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def peak_flops_per_s(name: str) -> float | None:
    """Peak of dense matrix products in bf16 and fp16; None if unknown, as for a part of a GPU.

    Args:
        name: of the device.
    """
    if "MIG" in name:
        return None
    name = name.lower()
    return next(
        (1e12 * tflops for part, tflops in PEAK_TFLOPS.items() if part.lower() in name), None
    )
