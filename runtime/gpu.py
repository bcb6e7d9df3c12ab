"""GPUs: how fast they can be, and how they are doing by NVIDIA's management library (NVML)."""

import re
from collections.abc import Callable
from typing import Any

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


def peak_flops_per_s(device_name: str) -> float | None:
    """Peak of dense matrix products in bf16 and fp16, as the data sheet has it; None if unknown,
    as for a part of a GPU.

    Args:
        device_name: as torch.cuda.get_device_name has it.
    """
    words = set(re.findall("[A-Z0-9]+", device_name.upper()))
    if "MIG" in words:
        return None
    peaks = (peak for name, peak in PEAK_TFLOPS.items() if words.issuperset(name))
    tflops = next(peaks, None)
    return None if tflops is None else 1e12 * tflops


def open_gpu(uuid: str) -> Any | None:
    """NVML's handle of a GPU; None where there is no NVML.

    Args:
        uuid: without the "GPU-" that NVML puts before it.
    """
    import pynvml

    try:
        pynvml.nvmlInit()
        return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    except pynvml.NVMLError:
        return None


def read_health(gpu: Any) -> dict[str, Any]:
    """temperature_celsius, sm_clock_mhz, power_watts, throttle: why the clock is lowered, and
    ecc_errors: uncorrected ones since the driver was loaded. None for what the GPU cannot say.

    Args:
        gpu: NVML's handle.
    """
    import pynvml

    milliwatts = ask(pynvml.nvmlDeviceGetPowerUsage, gpu)
    return {
        "temperature_celsius": ask(
            pynvml.nvmlDeviceGetTemperature, gpu, pynvml.NVML_TEMPERATURE_GPU
        ),
        "sm_clock_mhz": ask(pynvml.nvmlDeviceGetClockInfo, gpu, pynvml.NVML_CLOCK_SM),
        "power_watts": None if milliwatts is None else milliwatts / 1000,
        "throttle": throttle_reasons(gpu),
        "ecc_errors": ecc_errors(gpu),
    }


def throttle_reasons(gpu: Any) -> list[str]:
    """Why its clock is lowered, as far as it points to a fault; not its usual limit of power."""
    import pynvml

    reasons = ask(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons, gpu) or 0
    masks = {
        "hardware slowdown": pynvml.nvmlClocksThrottleReasonHwSlowdown,
        "heat": pynvml.nvmlClocksThrottleReasonHwThermalSlowdown
        | pynvml.nvmlClocksThrottleReasonSwThermalSlowdown,
        "power brake": pynvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown,
    }
    return [name for name, mask in masks.items() if reasons & mask]


def ecc_errors(gpu: Any) -> int | None:
    """Uncorrected memory errors since the driver was loaded; None without ECC."""
    import pynvml

    kind, since = pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC
    return ask(pynvml.nvmlDeviceGetTotalEccErrors, gpu, kind, since)


def ask(question: Callable[..., Any], *arguments: Any) -> Any:
    """NVML's answer, or None if the GPU does not support the question."""
    import pynvml

    try:
        return question(*arguments)
    except pynvml.NVMLError:
        return None
