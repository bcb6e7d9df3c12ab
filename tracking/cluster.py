"""What a run is on: hosts, devices and versions."""

import platform
import socket
from importlib.metadata import version
from typing import Any

import torch

from runtime.agreement import gather_json
from runtime.process_group import Ranks

PACKAGES = ("torch", "deepspeed", "transformers")


def describe_cluster(ranks: Ranks) -> dict[str, Any]:
    """The hosts, GPUs and versions of a job; a collective, the same on all ranks.

    Returns:
        hosts: their names, in rank order; gpus: for each host the model names of its ranks' GPUs,
        none on CPU; versions: of Python and its packages, of CUDA and NCCL on GPUs, as rank 0 has
        them.
    """
    on_gpu = ranks.device.type == "cuda"
    versions = {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}}
    if on_gpu:
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        versions |= {"cuda": str(torch.version.cuda), "nccl": nccl}
    gpu = torch.cuda.get_device_name(ranks.device) if on_gpu else None
    everyone = gather_json(ranks, [socket.gethostname(), gpu, versions])
    gpus: dict[str, list[str]] = {}
    for host, name, _ in everyone:
        gpus.setdefault(host, []).extend([name] if name else [])
    return {"hosts": list(gpus), "gpus": list(gpus.values()), "versions": everyone[0][2]}
