"""Starts ranks of train.py by forking a process that has already imported everything, which saves
4 s per rank. Each rank is a separate process, with the variables that a launcher would set.

    python tests/harness/fork_server.py

Reads requests from standard input and writes answers to standard output, as one JSON per line:
    {"argv": [...], "ranks": 2, "log": FILE, "port": P, "environment": {...}, "module": "train"}
        -> {"pids": [...]}; the module's main is called like train.py's. "environment" may replace
        the variables of the launcher. With "at": FOLDER and
        "disks": {"/disk_1": 2, ...} 2 ranks run on node-1, where FOLDER shows disk_1.
        "module" may be scripts.NAME instead, which is run as by `python -m scripts.NAME ARGV`.
        Without "launched" it gets no variables of a launcher.
    {"wait": [pid, ...]}  -> {"codes": [...]}, negative for a signal
"""

import ctypes
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys
import threading
import traceback
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(TESTS.parent), str(TESTS), str(TESTS / "mains")]
gc.disable()  # until serve(), as in train.py
os.environ.pop("TORCHDYNAMO_DISABLE", None)  # of the launch tests: some forked ranks compile

import deepspeed.module_inject.auto_ep_layer
import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401
import pandas  # noqa: F401  by pyarrow, where rows are tokenized
import peft  # noqa: F401  where model.lora is set, takes a second; loads the compiler
import transformers.models.llama.modeling_llama
import transformers.optimization  # noqa: F401  for get_scheduler
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

import train  # noqa: F401  and everything that it imports
from zerotrain.config.parse import parse_command_line
from zerotrain.runtime.errors import exit_on_error

get_checkpoint_conversion_mapping("")  # compiles the patterns of all models, .2 s
CLONE_NEWNS, CLONE_NEWUTS, MS_BIND, MS_PRIVATE = 0x20000, 0x4000000, 4096, 1 << 18  # <sched.h>
MS_REC = 16384


def move_to_node(request, number):
    """Give this process the host name and mounts of its rank's node. Needs root."""
    nodes = list(request["disks"].items())
    places = [(i, local) for i, (_, ranks) in enumerate(nodes) for local in range(ranks)]
    node, local_rank = places[number]
    disk, ranks = nodes[node]
    libc = ctypes.CDLL(None, use_errno=True)
    done = [
        libc.unshare(CLONE_NEWNS | CLONE_NEWUTS),
        libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None),
        libc.mount(disk.encode(), request["at"].encode(), None, MS_BIND, None),
    ]
    assert done == [0, 0, 0], os.strerror(ctypes.get_errno())
    socket.sethostname(f"node-{node + 1}")
    os.environ.update(LOCAL_RANK=str(local_rank), LOCAL_WORLD_SIZE=str(ranks))


def rank(request, number):
    """Run one rank, in a forked process."""
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.setsid()
    # a suite that a shell has started in the background ignores it
    signal.signal(signal.SIGINT, signal.default_int_handler)
    ranks = str(request["ranks"])
    launched = dict(
        RANK=str(number), LOCAL_RANK=str(number), WORLD_SIZE=ranks, LOCAL_WORLD_SIZE=ranks,
        LOCAL_SIZE=ranks,  # or DeepSpeed runs numactl in each backward pass of ZeRO 3
        MASTER_ADDR="127.0.0.1", MASTER_PORT=request["port"],
    )  # fmt: skip
    if request["launched"]:
        os.environ.update(launched)
    os.environ.update(request["environment"])
    if request.get("disks"):
        move_to_node(request, number)
    if "." in request["module"]:  # not train, nor one of tests/mains
        sys.argv = [request["module"], *request["argv"]]
        runpy.run_module(request["module"], run_name="__main__", alter_sys=True)
        return
    main = importlib.import_module(request["module"]).main

    def run():
        command_line = parse_command_line(request["argv"])
        main(command_line.config, command_line.dry_run)

    exit_on_error(run)


def serve():
    gc.enable()
    gc.freeze()  # collections in the forked processes would copy all pages
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            ended = (os.waitpid(pid, 0)[1] for pid in request["wait"])
            answer = {"codes": list(map(os.waitstatus_to_exitcode, ended))}
        else:
            pids = []
            for number in range(request["ranks"]):
                if (pid := os.fork()) == 0:
                    code = 1
                    try:
                        rank(request, number)
                        code = 0
                    except SystemExit as end:
                        code = end.code or 0
                    except BaseException:
                        traceback.print_exc()
                    finally:
                        threading._shutdown()  # as Python does: ends executors, joins threads
                        sys.stdout.flush()
                        sys.stderr.flush()
                        os._exit(code)
                pids.append(pid)
            answer = {"pids": pids}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    serve()
