"""Stands for `subprocess` where zerotrain/tools/local_ranks.py starts a rank in a forked process:
`python WORDS` runs in a fork of that process, which has imported everything already.
"""

import multiprocessing
import os
import runpy
import sys

STDOUT = None
Process = multiprocessing.get_context("fork").Process


class Popen:
    def __init__(self, command, env, stdout, stderr, process_group):
        self.process = Process(target=work, args=(command[1:], env, stdout.fileno()))
        self.process.start()
        self.pid = self.process.pid
        os.setpgid(self.pid, process_group)

    def wait(self):
        self.process.join()


def work(words, env, output):
    """Do what Python does with a command line: `-c CODE`, `-m MODULE` or a script."""
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(env)
    kind, *sys.argv = words if words[0] in ("-c", "-m") else ["", *words]
    if kind == "-c":
        exec(sys.argv[0], {})
    elif kind == "-m":
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")
