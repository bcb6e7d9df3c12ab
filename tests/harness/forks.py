"""Ranks that are forked from a process with all imports done; the other end is fork_server.py."""

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from harness.processes import Finished, environment, free_port, wait_until
from harness.repository import REPO


class Forked:
    """The ranks of one run, started by the fork server."""

    def __init__(self, server, log, pids):
        self.server, self.log, self.pids = server, log, pids

    def poll(self):
        """None while a rank is running. The ranks stay zombies until `wait`."""
        for pid in self.pids:
            with suppress(FileNotFoundError):  # faster than psutil
                if ") Z " not in Path(f"/proc/{pid}/stat").read_text():
                    return None
        return "all ranks have ended"

    def wait(self, code=None):
        """The first non-zero exit code in rank order, which has to be `code` if that is given, and
        the output of all ranks. Ranks that do not end are killed, and fail the test with what they
        have printed.
        """
        try:
            wait_until(self.poll, self, self.log, interval=0.05)
        except BaseException:
            for rank in range(len(self.pids)):
                self.kill(rank)
            raise
        finally:
            codes = self.server.ask({"wait": self.pids})["codes"]
        finished = Finished(next(filter(None, codes), 0), self.log.read_text())
        assert code in (None, finished.code), finished.output
        return finished

    def until(self, happened):
        """Poll `happened()` until it is true; fails once all ranks have ended without it."""
        wait_until(happened, self, self.log, interval=0.002)

    def kill(self, rank, number=signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.kill(self.pids[rank], number)


class ForkServer:
    """Runs train.py on forked ranks; see fork_server.py."""

    def __init__(self, folder, repo=REPO):
        self.folder, self.repo, self.runs = folder, repo, 0
        self.process = subprocess.Popen(
            [sys.executable, str(repo / "tests" / "harness" / "fork_server.py")], cwd=repo,
            env={**environment(), "PYTHONPATH": str(repo)},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def close(self):
        self.process.stdin.close()
        self.process.wait(200)

    def ask(self, request):
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def start(self, config, *flags, ranks=1, module="train", disks=None, at=None, **variables):
        """`disks`: folder -> number of ranks; each folder is a node's own disk, mounted at `at`."""
        nodes = {}
        if disks:
            ranks, nodes["disks"] = sum(disks.values()), {str(k): n for k, n in disks.items()}
            nodes["at"] = str(at)
        return self._start(module, ["--config", config, *flags], ranks, variables, **nodes)

    def script(self, module, *args, code=None, **variables):
        """Run a script like `python -m MODULE ARGS`, but with its imports already done."""
        variables["TORCHDYNAMO_DISABLE"] = "1"  # for what it starts, as in `environment`
        return self._start(module, args, 1, variables, launched=False).wait(code)

    def _start(self, module, argv, ranks, variables, launched=True, **nodes):
        self.runs += 1
        log = self.folder / f"log_{self.runs}"
        request = {
            "argv": list(map(str, argv)), "ranks": ranks, "log": str(log), "port": free_port(),
            "environment": variables, "module": str(module), "launched": launched, **nodes,
        }  # fmt: skip
        log.touch()
        return Forked(self, log, self.ask(request)["pids"])

    def train(self, config, *flags, code=None, **options):
        """Train, and fail the test if the exit code is not `code`, if that is given."""
        return self.start(config, *flags, **options).wait(code)

    def refusal(self, config, *flags, **options):
        """The one line of `train`, which has to end with exit code 2."""
        finished = self.train(config, *flags, code=2, **options)
        assert "Traceback" not in finished.output
        return finished.error

    def finish(self, config, *flags, **options):
        """`train`, which has to succeed."""
        return self.train(config, *flags, code=0, **options)
