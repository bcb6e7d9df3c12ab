"""scripts/who_waits.py: which rank has left out a collective.

pytest tests/tools/test_collectives.py
"""

import json
import os
import pickle
import re
import shlex
import socket

import pytest
from harness.cures import refused

from zerotrain.tools.collectives import disagreements, read_calls, who_waits


def test_the_rank_that_left_out_an_all_reduce_is_named(forks, tiny_config, tmp_path):
    """Four gloo ranks. The command is the one that the hang's message names."""
    (tmp_path / "run").mkdir()
    ranks = forks.start(tiny_config(), ranks=4, module="left_out")
    found = r"python -m (scripts.who_waits) (\S*)\n"
    ranks.until(lambda: len(re.findall(found, ranks.log.read_text())) == 4)
    for rank in range(4):
        ranks.kill(rank)
    module, folder = re.search(found, ranks.log.read_text()).groups()
    [line] = forks.script(module, *shlex.split(folder), code=0).output.splitlines()
    assert line.startswith(f"rank 2 @ {socket.gethostname()} ")
    assert "gloo:all_reduce [[16, 2]]" in line and "gloo:broadcast [[5]]" in line


def test_the_rank_that_skipped_a_call_of_another_size_is_named(forks, tiny_config, tmp_path):
    """gloo aborts the other rank, which writes its calls before it ends."""
    (tmp_path / "run").mkdir()
    ranks = forks.start(tiny_config(), ranks=2, module="other_size")
    finished = ranks.wait()
    host = re.escape(socket.gethostname())
    assert finished.code != 0 and "collective mismatch" in finished.output
    assert re.search(rf"\[rank 1 @ {host}\] Fatal Python error: Aborted", finished.output)
    [(module, folder)] = re.findall(r"python -m (scripts.who_waits) (\S*)\n", finished.output)
    [line] = forks.script(module, *shlex.split(folder), code=0).output.splitlines()
    assert re.match(rf"rank 0 @ {host} has not joined gloo:all_reduce \[\[8\]\], call 8 ", line)
    assert "[[16, 2]] instead" in line


def nccl_record(calls, *, dropped=0):
    """A record as ProcessGroupNCCL dumps it, format 2.10: calls are (name, sizes) of group 0."""
    entries = [
        {
            "frames": [{"name": "step", "filename": "train.py", "line": 1}],
            "record_id": record, "pg_id": 0, "process_group": ("0", "default_pg"),
            "collective_seq_id": number, "p2p_seq_id": 0, "op_id": number, "profiling_name": name,
            "time_created_ns": 1795828849421133031, "duration_ms": 0.5, "input_sizes": [sizes],
            "input_dtypes": ["Float"], "output_sizes": [sizes], "output_dtypes": ["Float"],
            "state": "completed", "time_discovered_started_ns": None, "timeout_ms": 1800000,
            "time_discovered_completed_ns": None, "retired": True, "is_p2p": "send" in name,
        }
        for record, (number, name, sizes) in enumerate(calls)
    ]  # fmt: skip
    groups = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2, 3]"}}
    return {"version": "2.10", "entries": entries[dropped:], "pg_config": groups}


GATHER = [(n, "nccl:_allgather_base", [64]) for n in range(1, 6)]
REDUCE = [(6, "nccl:all_reduce", [16, 2])]
AFTER = (6, "nccl:all_reduce", [16, 2]), (7, "nccl:broadcast", [8])


@pytest.mark.parametrize(
    "of_rank_2, of_others, said",
    [
        (GATHER, GATHER + REDUCE, r"has not joined nccl:all_reduce \[\[16, 2\]\].*ranks 0, 1, 3"),
        (GATHER + [(6, "nccl:broadcast", [8])], GATHER + REDUCE, "nccl:broadcast .* instead"),
        (GATHER + [(6, "nccl:all_reduce", [8])], GATHER + REDUCE, r"all_reduce \[\[8\]\] instead"),
        (GATHER + REDUCE, GATHER, r"waits in nccl:all_reduce .* which ranks 0, 1, 3 have not"),
        ([], GATHER, "call 3 "),
        (GATHER + [(6, "nccl:all_to_all", [8])], GATHER + [(6, "nccl:all_to_all", [9])], None),
        (GATHER + [(6, "nccl:send 2->0", [8])], GATHER, None),
        (sorted(GATHER * 2), sorted(GATHER * 2), None),
        (GATHER, GATHER, None),
        ([*GATHER, (10**18, "nccl:barrier", [])], GATHER, "waits in nccl:barrier"),
    ],
)
def test_files_of_nccl_name_the_rank_and_its_host(tmp_path, of_rank_2, of_others, said):
    records = [
        nccl_record(of_rank_2 if rank == 2 else of_others, dropped=rank == 1) for rank in range(4)
    ]
    by_rank = {}
    for rank, record in enumerate(records):
        file = tmp_path / f"comm_lib_trace_rank_{rank}"
        file.write_bytes(pickle.dumps(record, protocol=2))
        found, host, by_rank[rank] = read_calls(file)
        assert (found, host) == (rank, "")
        text = f"[rank {rank} @ node-{rank}] \n{json.dumps(record)}\n"
        file.write_text(text + json.dumps({"version": "2.10", "pg_config": {}}))
        assert read_calls(file)[:2] == (rank, f"node-{rank}")
        assert read_calls(file)[2].items() >= by_rank[rank].items()
    lines = [*who_waits(by_rank, {rank: f"node-{rank}" for rank in range(4)})]
    assert len(lines) == (said is not None) and len([*disagreements(by_rank)]) == len(lines)
    assert not said or re.search(f"^rank 2 @ node-2 .*{said}", lines[0])
    del by_rank[3]
    assert next(who_waits(by_rank, {3: "node-3"})).startswith("rank 3 @ node-3: no record")


def with_shared_lists(key):
    """A record of a few bytes, in which a value has 2^60 numbers."""
    record = nccl_record(GATHER)
    value = (1,)
    for _ in range(60):
        value = (value, value)
    if key == "process_group":
        value = (value, value)
    for each in (record, record["pg_config"]["0"], *record["entries"]):
        if key in each:
            each[key] = value
    return record


def test_a_call_is_a_short_text_and_takes_a_short_time(tmp_path):
    """Sizes that a few bytes stand for, and a call of many, which differ in the last one."""
    file = tmp_path / "rank_0"
    file.write_bytes(pickle.dumps(with_shared_lists("input_sizes")))
    [calls] = read_calls(file)[2].values()
    assert all(len(text) < 300 for text in calls.values()) and len(calls) == len(GATHER)
    by_rank = {}
    for rank in range(3):
        many = [(1, "nccl:all_reduce", [i]) for i in range(3_000)]
        file.write_bytes(pickle.dumps(nccl_record([*many, (1, "nccl:all_reduce", [rank // 2])])))
        by_rank[rank] = read_calls(file)[2]
    [line] = who_waits(by_rank, {})
    assert line.startswith("rank 2 has not joined nccl:all_reduce") and len(line) < 600


class Hostile:
    def __reduce__(self):
        return os.system, ("touch ran",)


def test_a_file_that_is_no_record_is_refused_and_runs_nothing(forks, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"kind": "start", "step": 0, "world_size": [1]}\n')
    file = tmp_path / "rank_0"
    for content in (
        pickle.dumps(nccl_record(GATHER) | {"more": Hostile()}),
        b"\x80\x02cbuiltins\neval\n(V1\ntR.",
        b"\x80\x02Nr\xff\xff\xff\xff.",  # asks for a memo of 32 GB
        b"\x80\x02" + b"(" * 100_000,
        pickle.dumps(nccl_record(GATHER))[:-9],
        pickle.dumps(nccl_record(GATHER) | {"version": "3.0"}),
        pickle.dumps(nccl_record([("1a", "nccl:barrier", [1])])),
        pickle.dumps([1]),
        b"[rank 0 @ a] \n" + b"[" * 100_000,
        b"[rank 0 @ a] \n{}",
        b"",
        *(pickle.dumps(with_shared_lists(key)) for key in ("process_group", "desc", "version")),
        pickle.dumps(nccl_record([]) | {"entries": nccl_record(GATHER)["entries"][:1] * 200_000}),
    ):
        file.write_bytes(content)
        refused("rank_0: ", read_calls, file)
    file.write_bytes(pickle.dumps({"entries": Hostile()}))
    done = forks.script("scripts.who_waits", tmp_path, code=2)
    assert len(done.output.splitlines()) == 1 and "system" in done.output
    assert not (tmp_path / "ran").exists()
    file.unlink()
    assert "no files" in forks.script("scripts.who_waits", tmp_path, code=2).output
