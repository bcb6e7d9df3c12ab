"""Preflight's job: ports, process group, a checked all-reduce, and the bandwidth of every link.

    python -m zerotrain.launch.bandwidth SECONDS FILE HOST ...

Runs on every rank; SECONDS is the time to meet, and HOST the name of each rank's host. Rank 0
prints the results, and a warning for each host, pair of hosts or GPU that is slower than the
others, and writes the bandwidths of the slowest host and of all ranks into FILE, if that is not
empty, for the plan of a run.
"""

import json
import math
import os
import statistics
import sys
import timeit
from collections.abc import Callable
from itertools import combinations, pairwise
from pathlib import Path

import torch
import torch.distributed as dist

from zerotrain.runtime.errors import EnvironmentFailure, UserError, describe, exit_on_error
from zerotrain.runtime.process_group import process_group
from zerotrain.runtime.ranks import Ranks

REPEATS = 5
GPU_BYTES = 256 << 20
CPU_BYTES = 4 << 20
GPU_MATMUL = 8192
CPU_MATMUL = 512
MAX_PAIRED = 8  # hosts of which every pair is measured; of more, neighbors
KINDS = (("inside", "GB/s", 0.5), (" - ", "GB/s", 0.5), ("matmul", "TFLOP/s", 0.8),
         ("all ranks", "GB/s", 0))  # fmt: skip
"""Of measurements: a part of their names, their unit, and the least share of the upper quartile, so
that one slow host of three shows, which two of the three pairs have.
"""


def median_seconds(work: Callable[[], object]) -> float:
    """Median time of a call; the first one, which sets up connections, does not count."""

    def wait_for_work() -> None:
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    return statistics.median(timeit.repeat(wait_for_work, number=1, repeat=REPEATS + 1)[1:])


def all_reduce_gb_per_s(payload: torch.Tensor, ranks: list[int]) -> float:
    """Bus bandwidth of an all-reduce among `ranks`; infinite on the others. All ranks call it."""
    group = dist.new_group(ranks)
    if dist.get_rank() not in ranks or len(ranks) == 1:
        return math.inf
    seconds = median_seconds(lambda: dist.all_reduce(payload, group=group))
    dist.destroy_process_group(group)  # there may be dozens, each with buffers on the GPU
    return payload.nbytes * 2 * (len(ranks) - 1) / len(ranks) / seconds / 1e9


def measure(ranks: Ranks, hosts: list[str]) -> dict[str, float]:
    """Bandwidth among all ranks, inside each host, and between hosts, in GB/s, and the speed of
    each rank's matrix products, in TFLOP/s; as the slowest rank has measured it.

    Args:
        hosts: the host of each rank.
    """
    on_gpu = ranks.device.type == "cuda"
    of_host = {host: [r for r, name in enumerate(hosts) if name == host] for host in hosts}
    groups = {"all ranks": list(range(len(hosts)))}
    groups |= {f"inside {host}": members for host, members in of_host.items()}
    pairs = combinations(of_host, 2) if len(of_host) <= MAX_PAIRED else pairwise(of_host)
    for one, other in pairs:  # all their ranks, and so all their network cards
        groups[f"{one} - {other}"] = of_host[one] + of_host[other]
    payload = torch.zeros((GPU_BYTES if on_gpu else CPU_BYTES) // 4, device=ranks.device)
    found = {name: all_reduce_gb_per_s(payload, members) for name, members in groups.items()}
    size = GPU_MATMUL if on_gpu else CPU_MATMUL
    dtype = torch.bfloat16 if on_gpu else None
    matrix = torch.randn(size, size, device=ranks.device, dtype=dtype)
    speed = 2 * size**3 / median_seconds(lambda: matrix @ matrix) / 1e12
    for rank, host in enumerate(hosts):
        found[f"matmul of rank {rank} on {host}"] = speed if rank == ranks.rank else math.inf
    slowest = torch.tensor([*found.values()])
    dist.all_reduce(slowest, dist.ReduceOp.MIN, ranks.control)
    measured = zip(found, slowest.tolist(), strict=True)
    return {name: value for name, value in measured if value < math.inf}


def main(seconds: str, file: str, *hosts: str) -> None:
    rank = int(os.environ["RANK"])
    timeout = float(seconds) * (2 if rank == 0 else 1)  # first those that cannot reach rank 0
    try:
        with process_group(timeout) as ranks:
            total = torch.tensor(float(rank + 1), device=ranks.device)
            dist.all_reduce(total)
            if total.item() != math.comb(len(hosts) + 1, 2):
                raise UserError(f"rank {rank} on {hosts[rank]}: an all-reduce gives a wrong sum")
            measured = measure(ranks, list(hosts))
    except (EnvironmentFailure, dist.DistStoreError) as failure:
        why = describe(failure)
        if "EADDRINUSE" not in why:
            why = f"{why[:200]}; allow all traffic between the hosts, or name the right interface "
            why += "in NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME"
        raise UserError(f"ports: {hosts[rank]}: {why}") from None
    if rank == 0:
        show(measured)
        if file:
            inside = [rate for name, rate in measured.items() if name.startswith("inside ")]
            links = {"node_gb_per_s": min(inside)} if inside else {}
            if len(set(hosts)) > 1:
                links["network_gb_per_s"] = measured["all ranks"]
            Path(file).write_text(json.dumps(links))


def show(measured: dict[str, float]) -> None:
    """Print the measurements, and which are lower than those of the same kind."""
    for kind, unit, share in KINDS:
        values = {name: value for name, value in measured.items() if kind in name}
        for name, value in values.items():
            usual = sorted(values.values())[3 * len(values) // 4]
            if len(values) <= 8:
                print(f"{name}: {value:.3g} {unit}")
            if value < share * usual:
                print(f"warning: {name}: {value:.3g} {unit}, usual is {usual:.3g}")


if __name__ == "__main__":
    exit_on_error(lambda: main(*sys.argv[1:]))
