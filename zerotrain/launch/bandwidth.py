"""Preflight's job: a checked all-reduce, and the bandwidth of every link.

    python -m zerotrain.launch.bandwidth SECONDS FILE HOST ...

It runs on every rank. SECONDS is the time for the ranks to meet, HOST the name of each rank's host.
Rank 0 prints the results, with a warning for each host, pair of hosts or GPU that is slower than
the others. Unless FILE is empty, rank 0 writes the bandwidths of the slowest host and of all ranks
there, for the planner.
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
MAX_PAIRED = 8  # above this number of hosts, only neighbors are paired
KINDS = (("inside", "GB/s", 0.5), (" - ", "GB/s", 0.5), ("matmul", "TFLOP/s", 0.8),
         ("all ranks", "GB/s", 0))  # fmt: skip
"""Kinds of measurements: a part of their names, the unit, and the share of the upper quartile below
which a value is slow. The quartile is above the median so that one slow host of three is detected,
although it is in two of the three pairs.
"""


def median_seconds(work: Callable[[], object]) -> float:
    """Return the median time of a call, without the first, which sets up connections."""

    def wait_for_work() -> None:
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    return statistics.median(timeit.repeat(wait_for_work, number=1, repeat=REPEATS + 1)[1:])


def all_reduce_gb_per_s(payload: torch.Tensor, ranks: list[int]) -> float:
    """Return the bus bandwidth of an all-reduce among `ranks`. All ranks call it.

    It is infinite on the other ranks.
    """
    group = dist.new_group(ranks)
    if dist.get_rank() not in ranks or len(ranks) == 1:
        return math.inf
    seconds = median_seconds(lambda: dist.all_reduce(payload, group=group))
    dist.destroy_process_group(group)  # dozens of groups would fill the GPU with buffers
    return payload.nbytes * 2 * (len(ranks) - 1) / len(ranks) / seconds / 1e9


def measure(ranks: Ranks, hosts: list[str]) -> dict[str, float]:
    """Return measurements by name, each as the slowest rank has measured it.

    They are the bandwidths among all ranks, inside each host and between hosts in GB/s, and the
    speed of each rank's matrix products in TFLOP/s.

    Args:
        hosts: the host of each rank.
    """
    on_gpu = ranks.device.type == "cuda"
    payload_bytes, size = (256 << 20, 8192) if on_gpu else (4 << 20, 512)
    of_host = {host: [r for r, name in enumerate(hosts) if name == host] for host in hosts}
    groups = {"all ranks": list(range(len(hosts)))}
    groups |= {f"inside {host}": members for host, members in of_host.items()}
    pairs = combinations(of_host, 2) if len(of_host) <= MAX_PAIRED else pairwise(of_host)
    for one, other in pairs:  # all ranks of both hosts use all their network cards
        groups[f"{one} - {other}"] = of_host[one] + of_host[other]
    payload = torch.zeros(payload_bytes // 4, device=ranks.device)
    found = {name: all_reduce_gb_per_s(payload, members) for name, members in groups.items()}
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
    # Rank 0 waits longer, so that the ranks that cannot reach it report first.
    timeout = float(seconds) * (2 if rank == 0 else 1)
    try:
        with process_group(timeout) as ranks:
            total = torch.tensor(float(rank + 1), device=ranks.device)
            dist.all_reduce(total)
            if total.item() != math.comb(len(hosts) + 1, 2):
                raise UserError(
                    f"rank {rank} on {hosts[rank]}: an all-reduce returns a wrong sum; compare "
                    "versions, then test memory and network cards"
                )
            measured = measure(ranks, list(hosts))
    except (EnvironmentFailure, dist.DistStoreError) as failure:
        raise UserError(
            f"ports: {hosts[rank]}: {describe(failure)[:200]}; allow all traffic between hosts, "
            "or name the right interface in NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME"
        ) from None
    if rank == 0:
        show(measured)
        if file:
            inside = [rate for name, rate in measured.items() if name.startswith("inside ")]
            links = {"node_gb_per_s": min(inside)} if inside else {}
            if len(set(hosts)) > 1:
                links["network_gb_per_s"] = measured["all ranks"]
            Path(file).write_text(json.dumps(links))


def show(measured: dict[str, float]) -> None:
    """Print the measurements, and a warning for each that is slow for its kind."""
    for kind, unit, share in KINDS:
        values = {name: value for name, value in measured.items() if kind in name}
        for name, value in values.items():
            usual = sorted(values.values())[3 * len(values) // 4]
            if len(values) <= 8:
                print(f"{name}: {value:.3g} {unit}")
            if value < share * usual:
                print(f"warning: {name}: {value:.3g} {unit}, the upper quartile is {usual:.3g}")


if __name__ == "__main__":
    exit_on_error(lambda: main(*sys.argv[1:]))
