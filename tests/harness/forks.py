"""Starts ranks and scripts in forks of fork_server.py, which has imported everything."""

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from harness.processes import Finished, environment, free_port, wait_until
from harness.repository import REPO

SMALL_CHUNKS = {"zerotrain.training.loss.CHUNK_TOKENS": "{'cpu': 60}"}
"""Patches that make the loss compute 60 targets at a time, so that steps have several chunks."""


class Forked:
    """The ranks of one run, started by the fork server."""

    def __init__(self, server, log, pids):
        self.server, self.log, self.pids = server, log, pids

    def poll(self):
        """None while a rank is running."""
        for pid in self.pids:
            with suppress(FileNotFoundError):  # faster than psutil
                if ") Z " not in Path(f"/proc/{pid}/stat").read_text():
                    return None
        return "all ranks have ended"

    def wait(self, code=None):
        """Return the first non-zero exit code in rank order, and the output of all ranks. Fails if
        `code` is given and differs. Ranks that do not end are killed, and fail the test.
        """
        try:
            wait_until(self.poll, self, self.log, interval=0.05)
        except BaseException:
            for rank in range(len(self.pids)):
                self.kill(rank)
            raise
        finally:
            codes = self.server.ask({"wait": self.pids})
        finished = Finished(next(filter(None, codes), 0), self.log.read_text())
        assert code in (None, finished.code), finished.output
        return finished

    def until(self, happened):
        """Poll `happened()` until it is true. Fails if all ranks end before."""
        wait_until(happened, self, self.log, interval=0.002)

    def kill(self, rank, number=signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.kill(self.pids[rank], number)


class ForkServer:
    """Runs train.py and scripts in forks; see fork_server.py."""

    def __init__(self, folder, repo=REPO):
        self.folder, self.repo, self.runs = folder, repo, 0
        packages = [str(repo / name) for name in (".", "tests", "tests/mains")]
        variables = environment() | {"PYTHONPATH": os.pathsep.join(packages)}
        del variables["TORCHDYNAMO_DISABLE"]  # some forked ranks compile
        self.process = subprocess.Popen(
            [sys.executable, "-m", "harness.fork_server"], cwd=repo, env=variables,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def close(self):
        self.process.stdin.close()
        self.process.wait(200)

    def ask(self, request):
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def make_cache(self, config, *flags, patches=None, **variables):
        """Tokenize the rows of a run in one fork, so that no rank has to start a process that
        imports everything. The ranks meet the same errors again, and report them.
        """
        self._start("make_cache", ["--config", config, *flags], [(variables, None)], patches).wait()

    def start(
        self,
        config,
        *flags,
        ranks=1,
        module="train",
        patches=None,
        disks=None,
        at=None,
        **variables,
    ):
        """Start the ranks of a run, and leave them running.

        Args:
            module: train, or one of tests/mains, whose main is called like train.py's.
            patches: values to replace, described in fork_server.py.
            disks: folder -> number of ranks; each folder is a node's own disk, mounted at `at`.
            variables: environment variables; they replace the launcher's.
        """
        self.make_cache(config, *flags, patches=patches, **variables)
        places = [
            (disk and (f"node-{node}", str(disk), str(at)), local_rank, local_size)
            for node, (disk, local_size) in enumerate((disks or {None: ranks}).items(), 1)
            for local_rank in range(local_size)
        ]
        port, processes = free_port(), []
        for rank, (node, local_rank, local_size) in enumerate(places):
            launched = {
                "RANK": rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": len(places),
                "LOCAL_WORLD_SIZE": local_size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
                "LOCAL_SIZE": len(places),  # or each backward pass of ZeRO 3 runs numactl
            }  # fmt: skip
            processes.append(({k: str(v) for k, v in launched.items()} | variables, node))
        return self._start(module, ["--config", config, *flags], processes, patches)

    def script(self, module, *args, code=None, patches=None, **variables):
        """Run `python -m MODULE ARGS` to its end, with its imports already done."""
        variables["TORCHDYNAMO_DISABLE"] = (
            "1"  # for the processes that it starts, as in `environment`
        )
        return self._start(module, args, [(variables, None)], patches).wait(code)

    def _start(self, module, argv, processes, patches=None):
        """Start a module in forks with the given (environment variables, node)."""
        self.runs += 1
        log = self.folder / f"log_{self.runs}"
        log.touch()
        request = {
            "module": module,
            "argv": list(map(str, argv)),
            "log": str(log),
            "patches": patches or {},
        }
        pids = [
            self.ask(request | {"environment": variables, "node": node})
            for variables, node in processes
        ]
        return Forked(self, log, pids)

    def train(self, config, *flags, code=None, **options):
        """Train to the end. Fails if `code` is given and the exit code differs."""
        return self.start(config, *flags, **options).wait(code)

    def refusal(self, config, *flags, **options):
        """Train, which must fail with exit code 2, and return the line that says why."""
        finished = self.train(config, *flags, code=2, **options)
        assert "Traceback" not in finished.output
        return finished.error

    def finish(self, config, *flags, **options):
        """Train, which must succeed."""
        return self.train(config, *flags, code=0, **options)
