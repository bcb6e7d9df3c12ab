"""Preflight's job: ports, process group, a checked all-reduce, and the bandwidth of every link.

Runs on every rank. Rank 0 prints the results, and a warning for each host, pair of hosts or GPU
that is slower than the others, and writes the bandwidths of the slowest host and of all ranks into
a file, if one is named, for the plan of a run.
"""

import json
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from zerotrain.runtime.errors import UserError, exit_on_error

REPEATS = 5
GPU_BYTES = 256 << 20
CPU_BYTES = 4 << 20
GPU_MATMUL = 8192
CPU_MATMUL = 512
# of the median
MIN_LINK = 0.5
MIN_MATMUL = 0.8


def connect(seconds: float) -> None:
    """Wait until the master port answers, so that a firewall is told from a rank that is late."""
    target = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    deadline = time.monotonic() + seconds
    problem: OSError = TimeoutError("timed out")
    while time.monotonic() < deadline:
        try:
            return socket.create_connection(target, 5).close()
        except OSError as error:
            problem = error
            time.sleep(0.5)
    raise UserError(
        f"ports: {socket.gethostname()} cannot connect to {target[0]} port {target[1]} "
        f"({problem}); allow all traffic between the hosts, or name the right interface in "
        "NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME"
    )


def median_seconds(work: Callable[[], object], device: torch.device) -> float:
    """Median time of a call; the first one, which sets up connections, does not count."""
    times = []
    for _ in range(REPEATS + 1):
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


def all_reduce_gb_per_s(payload: torch.Tensor, ranks: list[int]) -> float | None:
    """Bus bandwidth of an all-reduce among `ranks`; None on the others. All ranks call it."""
    group = dist.new_group(ranks)
    if dist.get_rank() not in ranks or len(ranks) == 1:
        return None
    seconds = median_seconds(lambda: dist.all_reduce(payload, group=group), payload.device)
    return payload.nbytes * 2 * (len(ranks) - 1) / len(ranks) / seconds / 1e9


def exchange(store: dist.Store, name: str, value: object) -> list[Any]:
    """The value of each rank, as JSON; torch's object collectives would unpickle."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    store.set(f"{name}/{rank}", json.dumps(value))
    return [json.loads(store.get(f"{name}/{other}")) for other in range(ranks)]


def join_group(timeout_seconds: float, device: torch.device) -> dist.Store:
    """Create the process group. Returns its store."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if rank > 0:
        connect(timeout_seconds)
    limit = timedelta(seconds=2 * timeout_seconds)  # the cause that connect() tells comes first
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, ranks, is_master=rank == 0, timeout=limit)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=limit)
    return store


def measure(device: torch.device, names: list[str]) -> dict[str, float | None]:
    """Bandwidth among all ranks, inside each host, and between each host and the next, and the
    speed of this rank's matrix products. None where this rank has no part. All ranks call it.

    Args:
        names: the host of each rank.
    """
    on_gpu = device.type == "cuda"
    of_host = {host: [r for r, name in enumerate(names) if name == host] for host in names}
    payload = torch.zeros((GPU_BYTES if on_gpu else CPU_BYTES) // 4, device=device)
    measured = {"all ranks": all_reduce_gb_per_s(payload, list(range(len(names))))}
    for host, ranks in of_host.items():
        measured[f"inside {host}"] = all_reduce_gb_per_s(payload, ranks)
    for one, other in pairwise(of_host):  # all their ranks, and so all their network cards
        measured[f"{one} - {other}"] = all_reduce_gb_per_s(payload, of_host[one] + of_host[other])
    size = GPU_MATMUL if on_gpu else CPU_MATMUL
    matrix = torch.randn(size, size, device=device, dtype=torch.bfloat16 if on_gpu else None)
    seconds = median_seconds(lambda: matrix @ matrix, device)
    rank = dist.get_rank()
    measured[f"matmul of rank {rank} on {names[rank]}"] = 2 * size**3 / seconds / 1e12
    return measured


def main(timeout_seconds: float, file: str) -> None:
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    store = join_group(timeout_seconds, device)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    total = torch.tensor(float(rank + 1), device=device)
    dist.all_reduce(total)
    if total.item() != ranks * (ranks + 1) / 2:
        raise UserError(f"rank {rank} on {socket.gethostname()}: an all-reduce gives a wrong sum")
    names = exchange(store, "host", socket.gethostname())
    everything: dict[str, float] = {}
    for measured in reversed(exchange(store, "measured", measure(device, names))):
        everything |= {name: value for name, value in measured.items() if value is not None}
    if rank == 0:
        show(everything)
        if file:
            inside = [rate for name, rate in everything.items() if name.startswith("inside ")]
            links = {"node_gb_per_s": min(inside)} if inside else {}
            if len(set(names)) > 1:
                links["network_gb_per_s"] = everything["all ranks"]
            Path(file).write_text(json.dumps(links))
    dist.barrier()
    dist.destroy_process_group()


def show(measured: dict[str, float]) -> None:
    """Print the measurements, and which are lower than those of the same kind."""
    kinds = {"inside": ("GB/s", MIN_LINK), " - ": ("GB/s", MIN_LINK),
             "matmul": ("TFLOP/s", MIN_MATMUL), "all ranks": ("GB/s", 0.0)}  # fmt: skip
    for kind, (unit, fraction) in kinds.items():
        values = {name: value for name, value in measured.items() if kind in name}
        if not values:
            continue
        middle = statistics.median(values.values())
        for name, value in values.items():
            if kind == "all ranks" or len(values) <= 8:
                print(f"{name}: {value:.3g} {unit}")
            if value < fraction * middle:
                print(f"warning: {name}: {value:.3g} {unit}, the median is {middle:.3g}")


if __name__ == "__main__":
    exit_on_error(lambda: main(float(sys.argv[1]), sys.argv[2]))
