"""Runs train.py and scripts in forks of a process that has imported everything already. This saves
4 s per rank. Each rank is a process of its own, with the variables that a launcher would set.

    python -m harness.fork_server

It reads requests from standard input and answers on standard output, one JSON value per line:
    {"module": "train", "argv": [...], "log": FILE, "environment": {...}, "patches": {...},
     "node": [HOST, DISK, FOLDER] or null}  -> the process id
    {"wait": [pid, ...]}  -> the exit codes, negative for a signal

The module is train, one of tests/mains, or scripts.NAME, which runs as by `python -m scripts.NAME`.
"patches" replaces values of modules and classes: a name with dots -> a Python expression, evaluated
where the name is defined. With "node", the process runs as host HOST, where FOLDER shows DISK.
"""

import gc

gc.disable()  # Imports make no garbage. Looking for it takes a fifth of their time.

import ctypes
import importlib
import json
import multiprocessing
import os
import pkgutil
import runpy
import socket
import subprocess
import sys

import deepspeed.module_inject.auto_ep_layer
import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401
import pandas  # noqa: F401  pyarrow imports it where rows are tokenized
import peft  # noqa: F401  imported where model.lora is set; loads the compiler, 1 s
import transformers.models.llama.modeling_llama
import transformers.optimization  # noqa: F401  get_scheduler imports it
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

import train  # noqa: F401  and everything that it imports
import zerotrain.rows.tokenize  # noqa: F401
from zerotrain.config.parse import parse_command_line
from zerotrain.runtime.errors import exit_on_error

get_checkpoint_conversion_mapping("")  # compiles the patterns of all models, 0.2 s
CLONE_NEWNS, CLONE_NEWUTS = 0x20000, 0x4000000  # <sched.h>; os.unshare comes with Python 3.12
Process = multiprocessing.get_context("fork").Process


def enter_node(host, disk, folder):
    """Give this process a host name, and mounts in which `folder` shows `disk`. Needs root."""
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.unshare(CLONE_NEWNS | CLONE_NEWUTS) == 0, os.strerror(ctypes.get_errno())
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["mount", "--bind", disk, folder], check=True)
    socket.sethostname(host)


def work(request):
    """Do what a request asks for, in a forked process."""
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.setsid()
    os.environ.update(request["environment"])
    if request["node"]:
        enter_node(*request["node"])
    for name, expression in request["patches"].items():
        owner, _, attribute = name.rpartition(".")
        owner = pkgutil.resolve_name(owner)
        setattr(owner, attribute, eval(expression, dict(vars(owner))))
    module, argv = request["module"], request["argv"]
    if module.startswith(("scripts.", "zerotrain.", "benchmarks.")):
        sys.argv = [module, *argv]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        return
    main = importlib.import_module(module).main

    def run():
        command_line = parse_command_line(argv)
        main(command_line.config, command_line.dry_run)

    exit_on_error(run)


def serve():
    gc.freeze()  # collections in the forked processes would copy all pages
    gc.enable()
    started = {}
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            ended = [started.pop(pid) for pid in request["wait"]]
            for process in ended:
                process.join()
            answer = [process.exitcode for process in ended]
        else:
            process = Process(target=work, args=(request,))
            process.start()
            started[process.pid] = process
            answer = process.pid
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    serve()
