"""Preflight's collectives checks, run on every rank:  python -m cluster.collectives --timeout 60

Forms the process group and measures all-reduce, bandwidth between hosts and matmul. Each rank
writes what it is doing to LAUNCH_STATE_FILE, which the host's agent reports: if a rank hangs, the
states show which ranks are behind. Rank 0's last state is `done` followed by the results as JSON.
Works with every launcher, with gloo and with NCCL.
"""

import argparse
import json
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runtime.errors import exit_on_error
from runtime.rank_env import rank_variables

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

STEPS = (
    "starting",
    "connecting to the master",
    "waiting for the others",
    "forming the process group",
    "all-reduce",
    "all-reduce of all ranks, for its bandwidth",
    "sends between two hosts, for their bandwidth",
    "matmul",
    "done",
)
"""What a rank does, in this order. Every state starts with one of these strings."""
REPEATS = 5
GPU_BYTES, CPU_BYTES = 256 << 20, 8 << 20
"""Size of a message, large enough that latency (up to 1 ms) is under a tenth of the time."""
MATMUL_SECONDS = 1.0
GPU_MATMUL, CPU_MATMUL = 8192, 768
"""Rows and columns: large enough that a GPU is limited by compute."""


def say(step: str, more: str = "") -> None:
    """Report what this rank is doing: write it atomically to the file that the agent reads."""
    path = os.environ.get("LAUNCH_STATE_FILE")
    if path:
        draft = Path(f"{path}.draft")
        draft.write_text(f"{step}{more}")
        os.replace(draft, path)


def main(timeout_seconds: float) -> None:
    """Run all checks on this rank; rank 0 reports the results of all ranks."""
    say("starting")
    os.environ.update(rank_variables(os.environ))
    import torch
    import torch.distributed as dist

    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = choose_device()
    store = connect(timeout_seconds)
    hosts = wait_for_all(store, rank, ranks, timeout_seconds)

    say("forming the process group")
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=timeout_seconds),
        device_id=device if device.type == "cuda" else None,
    )
    say("all-reduce")
    value = torch.tensor(float(rank + 1), device=device)
    dist.all_reduce(value)
    result: dict[str, Any] = {"rank": rank, "host": hosts[rank], "sum": float(value),
                              "expected_sum": ranks * (ranks + 1) / 2}  # fmt: skip
    payload = torch.zeros((GPU_BYTES if device.type == "cuda" else CPU_BYTES) // 4, device=device)
    say(STEPS[5])
    result["all_reduce"] = measure_all_reduce(payload, ranks)
    say(STEPS[6])
    result["pairs"] = measure_pairs(payload, rank, hosts)
    say("matmul")
    result["matmul_flop_per_s"] = measure_matmul(device)

    store.set(f"result/{rank}", json.dumps(result))
    if rank == 0:
        results = [json.loads(store.get(f"result/{r}")) for r in range(ranks)]
        say("done", f" {json.dumps({'backend': backend, 'results': results})}")
    else:
        say("done")
    dist.barrier()  # rank 0 serves the store, so it must not exit first
    dist.destroy_process_group()


def choose_device() -> "torch.device":
    """The device of this rank: its GPU, else the CPU with an equal share of the host's cores."""
    import torch

    if torch.cuda.is_available() and os.environ.get("DS_ACCELERATOR") != "cpu":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        return device
    local_ranks = int(os.environ["LOCAL_WORLD_SIZE"])
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // local_ranks))
    return torch.device("cpu")


def connect(timeout_seconds: float) -> "dist.Store":
    """Connect to the store at MASTER_ADDR and MASTER_PORT.

    init_process_group would create the store and wait for all ranks in one call; done separately, a
    rank that hangs can report in which of the two.
    """
    from runtime.rendezvous import open_store

    where = f" at {os.environ['MASTER_ADDR']} port {os.environ['MASTER_PORT']}"
    say("connecting to the master", where)
    return open_store(timeout_seconds)


def wait_for_all(store: "dist.Store", rank: int, ranks: int, timeout_seconds: float) -> list[str]:
    """Wait until every rank has connected to the store; the host names by rank."""
    store.set(f"here/{rank}", socket.gethostname())
    deadline = time.monotonic() + timeout_seconds
    while missing := [r for r in range(ranks) if not store.check([f"here/{r}"])]:
        say("waiting for the others", f": rank {', '.join(map(str, missing[:8]))}")
        if time.monotonic() > deadline:
            sys.exit(f"rank {missing[0]} did not connect within {timeout_seconds:g} s")
        time.sleep(0.2)
    return [store.get(f"here/{r}").decode() for r in range(ranks)]


def seconds_of(work: Callable[[], Any], device: "torch.device") -> float:
    """Wall time of `work`, including everything that it starts on the device."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def measure_all_reduce(payload: "torch.Tensor", ranks: int) -> dict[str, Any]:
    """Bus bandwidth of an all-reduce of `payload` (fp32) over all ranks.

    As in nccl-tests (doc/PERFORMANCE.md, "AllReduce"): bytes / time x 2(n-1)/n, which does not
    depend on n and can be compared with the speed of the links.
    """
    import torch.distributed as dist

    size = payload.nbytes
    dist.all_reduce(payload)  # warm-up: opens the connections
    times = []
    for _ in range(REPEATS):
        dist.barrier()
        times.append(seconds_of(lambda: dist.all_reduce(payload), payload.device))
    return {
        "bytes": size,
        "bus_bytes_per_s": size / statistics.median(times) * 2 * (ranks - 1) / ranks,
    }


def measure_pairs(payload: "torch.Tensor", rank: int, hosts: list[str]) -> list[dict[str, Any]]:
    """Bandwidth between the first ranks of every pair of hosts, in rounds of disjoint pairs.

    Returns:
        The pairs of which this rank is the first: {"ranks": [a, b], "bytes_per_s": rate}.
    """
    import torch.distributed as dist

    first_ranks = [hosts.index(name) for name in dict.fromkeys(hosts)]
    measured = []
    for pairs in rounds(first_ranks):
        dist.barrier()
        for a, b in pairs:
            if rank not in (a, b):
                continue
            other, is_a = a + b - rank, rank == a

            def send_and_receive(other: int = other, is_a: bool = is_a) -> None:
                for sends in (is_a, not is_a):
                    if sends:
                        dist.send(payload, other)
                    else:
                        dist.recv(payload, other)

            send_and_receive()  # warm-up: opens the connection
            best = min(seconds_of(send_and_receive, payload.device) for _ in range(2))
            if is_a:
                measured.append({"ranks": [a, b], "bytes_per_s": 2 * payload.nbytes / best})
    dist.barrier()
    return measured


def measure_matmul(device: "torch.device") -> float:
    """FLOP/s of a square matmul, bf16 on a GPU and fp32 on CPU: the best of MATMUL_SECONDS, so that
    other processes that run for a moment do not count.
    """
    import torch
    import torch.distributed as dist

    on_gpu = device.type == "cuda"
    side = GPU_MATMUL if on_gpu else CPU_MATMUL
    matrix = torch.ones(side, side, device=device, dtype=torch.bfloat16 if on_gpu else None)
    for _ in range(3):
        matrix @ matrix
    dist.barrier()  # all ranks at once, as in training: they share power and cooling
    best, until = float("inf"), time.perf_counter() + MATMUL_SECONDS
    while time.perf_counter() < until:
        best = min(best, seconds_of(lambda: matrix @ matrix, device))
    return 2 * side**3 / best


def rounds(players: list[int]) -> list[list[tuple[int, int]]]:
    """All pairs, in as few rounds as possible, with nobody in two pairs of the same round.

    This is the circle method for round-robin tournaments: one player keeps its place and the others
    rotate around the table.
    """
    table: list[int | None] = list(players) + [None] * (len(players) % 2)
    found = []
    for _ in range(len(table) - 1):
        half = len(table) // 2
        pairs = zip(table[:half], reversed(table[half:]), strict=True)
        found.append([(a, b) for a, b in pairs if a is not None and b is not None])
        table = [table[0], table[-1], *table[1:-1]]
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--timeout", type=float, required=True, help="seconds")
    exit_on_error(lambda: main(parser.parse_args().timeout))
