"""What devices are called, and how fast they can be."""

import re

import torch

PEAK_TFLOPS = {
    ("B200",): 2250.0, ("GB200",): 2500.0,
    ("H200", "NVL"): 835.0, ("H200",): 989.0, ("GH200",): 989.0,
    ("H100", "PCIE"): 756.0, ("H100", "NVL"): 835.0, ("H100",): 989.0, ("H800",): 989.0,
    ("H20",): 148.0, ("A100",): 312.0, ("A800",): 312.0, ("A40",): 149.7, ("A30",): 165.0,
    ("A10",): 125.0, ("A10G",): 70.0, ("L40S",): 362.0, ("L40",): 181.0, ("L4",): 121.0,
    ("V100", "PCIE"): 112.0, ("V100",): 125.0, ("T4",): 65.0,
    ("MI300X",): 1307.0, ("MI325X",): 1307.0, ("MI250X",): 191.5, ("MI210",): 181.0,
}  # fmt: skip
"""Words of a device's name: dense TFLOP/s in bf16 and fp16 of its data sheet. The first entry whose
words are all in the name counts. An MI250X is two devices, and this is the peak of one.
"""


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def peak_flops_per_s(name: str) -> float | None:
    """Peak of dense matrix products in bf16 and fp16, as the data sheet has it; None if unknown,
    as for a part of a GPU.

    Args:
        name: of the device.
    """
    words = set(re.findall("[A-Z0-9]+", name.upper()))
    if "MIG" in words:
        return None
    peaks = (peak for parts, peak in PEAK_TFLOPS.items() if words.issuperset(parts))
    tflops = next(peaks, None)
    return None if tflops is None else 1e12 * tflops
