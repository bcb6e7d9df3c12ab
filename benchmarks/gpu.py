"""Check a GPU in about ten minutes: does everything run on it, how exactly, and how fast?

    python benchmarks/gpu.py --out FOLDER [--minutes 9] [--only NAME,...] [--continue] [--toy]

Runs the CHECKS, in order of value, each in a process of its own with a time limit; those that
measure time run alone. A check that fails does not stop the others. After each one, results.json
and table.txt in FOLDER are written again; a failed check has its problems there, and the last lines
of its output. When --minutes are over, what is running is stopped, and --continue runs what has no
result yet, in another call or on another day. --only runs the named checks again and keeps the
other results.

Needs one GPU, about 10 GB of disk and no network. benchmarks/wheels.py collects what a CUDA image
without a network lacks. --toy runs every check at toy size on CPU, to test this file; its figures
mean nothing. Exit code: 0 all checks that were asked for passed, 1 otherwise.
"""

import argparse
import importlib.util
import json
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rich.console import Console
from rich.table import Table

from benchmarks.gpu_checks import CHECKS, LONGEST, Check, Finding, Place
from runtime.errors import EXIT_FAILURE, UserError, exit_on_error

REPO = Path(__file__).resolve().parent.parent
TAIL_LINES = 30
WIDTH = 120  # columns; outside of a terminal rich would assume 80
LEAST = 15  # seconds: a check is not started with less time than this
AT_ONCE = 3  # checks that measure no time
SHOWN = {"passed": "passed", "failed": "FAILED", None: "not run"}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = ", ".join(check.name for check in CHECKS)
    parser.add_argument("--out", type=Path, required=True, help="folder of results.json")
    parser.add_argument("--minutes", type=float, default=9, help="for all checks together")
    parser.add_argument("--only", help=f"run these again, separated by commas: {names}")
    parser.add_argument(
        "--continue", action="store_true", dest="resume", help="run what is missing"
    )
    parser.add_argument("--toy", action="store_true", help="toy sizes, on CPU")
    parser.add_argument(
        "--micro_batch_tokens", type=int, default=LONGEST, help="of the dense shapes, on the GPU"
    )
    args = parser.parse_args()
    if args.micro_batch_tokens < LONGEST:
        raise UserError(f"--micro_batch_tokens must be at least {LONGEST:,}, the longest row")
    args.out = args.out.resolve()  # the checks run in another folder
    checks, report = chosen(args.only), read_report(args)
    todo = [c for c in checks if not (args.resume and c.name in report["checks"])]
    if args.toy:  # on a busy machine importing alone can take a minute
        todo = [replace(check, limit_seconds=4 * check.limit_seconds) for check in todo]
    if todo:
        prepare(args.toy)
        run_checks(todo, report, args)
    Console(width=WIDTH).print(table_of(report))
    if missing := [check.name for check in checks if check.name not in report["checks"]]:
        print(f"no time was left for {', '.join(missing)}: run it again with --continue")
    passed = [check.name for check in checks if is_passed(report, check)]
    sys.exit(0 if len(passed) == len(checks) else EXIT_FAILURE)


def is_passed(report: dict[str, Any], check: Check) -> bool:
    return report["checks"].get(check.name, {}).get("status") == "passed"


def run_checks(todo: list[Check], report: dict[str, Any], args: argparse.Namespace) -> None:
    """Run the checks until the time is over, and add their results to the report and to --out."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_FAILURE))  # for the `finally` blocks
    scratch = Path(tempfile.mkdtemp(prefix="gpu_check_"))
    # not the usual folder: a compiler that is stopped leaves a lock there, on which others wait
    os.environ["TORCH_EXTENSIONS_DIR"] = str(scratch / "torch_extensions")
    place = Place(scratch, args.toy, args.micro_batch_tokens)
    end = time.monotonic() + 60 * args.minutes
    waiting, running = list(todo), []
    try:
        while waiting or running:
            while waiting and may_start(waiting[0], running) and end > time.monotonic() + LEAST:
                running.append(Running(waiting.pop(0), place, end))
            if not running:
                return
            first_end = min(check.end for check in running)
            wait([c.process.sentinel for c in running], max(0, first_end - time.monotonic()))
            for check in [check for check in running if check.is_over]:
                running.remove(check)
                if (result := check.finish()) is not None:
                    report["checks"][check.name] = result
                    write_report(args.out, report)
    finally:
        for check in running:
            check.stop()
        shutil.rmtree(scratch, ignore_errors=True)


def may_start(check: Check, running: list["Running"]) -> bool:
    alone = check.alone or any(other.check.alone for other in running)
    return not running or (not alone and len(running) < AT_ONCE)


def chosen(only: str | None) -> list[Check]:
    """The checks to run, in the order of CHECKS."""
    names = [check.name for check in CHECKS]
    wanted = names if only is None else only.split(",")
    if unknown := [name for name in wanted if name not in names]:
        raise UserError(f"--only: no check is named {unknown[0]}; there are {', '.join(names)}")
    return [check for check in CHECKS if check.name in wanted]


def read_report(args: argparse.Namespace) -> dict[str, Any]:
    """The results so far; without any with neither --only nor --continue."""
    file = args.out / "results.json"
    if not (args.resume or args.only) or not file.is_file():
        args.out.mkdir(parents=True, exist_ok=True)
        return {"toy": args.toy, "checks": {}}
    try:
        report = json.loads(file.read_text())
    except ValueError as error:
        raise UserError(f"{file} is not a JSON file of this command: {error}") from error
    if report["toy"] != args.toy:
        raise UserError(f"{file} is from a run {'with' if report['toy'] else 'without'} --toy")
    return report


def prepare(toy: bool) -> None:
    """Set what every process of the checks inherits.

    Raises:
        UserError: there is no GPU, and --toy was not given.
    """
    os.chdir(REPO)
    os.environ |= {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled", "PYTHONUNBUFFERED": "1"}
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(REPO), os.environ.get("PYTHONPATH")])
    )
    if toy:
        os.environ |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        # imported before the processes are forked, which saves each of them ten seconds
        import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401
        import torch._inductor.compile_fx
        import transformers.models.llama.modeling_llama
        import transformers.models.qwen2.modeling_qwen2
        import transformers.trainer  # noqa: F401

        import tracking.startup  # noqa: F401
        import train  # noqa: F401

        return
    import torch

    if not torch.cuda.is_available():
        raise UserError("no CUDA device was found; --toy runs every check at toy size on CPU")
    os.environ.setdefault("OMP_NUM_THREADS", "4")  # several runs at a time share the cores
    find_cuda()


def find_cuda() -> None:
    """Let the compiler find CUDA where a machine has only nvcc, and the headers of the libraries
    (cuSPARSE, ...) in torch's packages.
    """
    toolkit = Path("/usr/local/cuda")
    if (toolkit / "bin" / "nvcc").exists():  # torch looks beside the nvcc on the PATH, maybe a link
        os.environ.setdefault("CUDA_HOME", str(toolkit))
    packages = importlib.util.find_spec("nvidia")
    folders = packages.submodule_search_locations if packages else ()
    headers = sorted(str(found) for at in folders for found in Path(at).glob("*/include"))
    if headers:  # not in CPATH, which comes before the headers of the toolkit
        before = os.environ.get("CPLUS_INCLUDE_PATH")
        os.environ["CPLUS_INCLUDE_PATH"] = os.pathsep.join(filter(None, [before, *headers]))


class Running:
    """A check in a process of its own."""

    def __init__(self, check: Check, place: Place, end: float) -> None:
        """Start it.

        Args:
            end: time.monotonic() when no check may run any more.
        """
        print(f"{check.name}: {check.about} ...", flush=True)
        self.check, self.name = check, check.name
        self.place = replace(place, folder=place.folder / check.name)
        self.place.folder.mkdir()
        self.began = time.monotonic()
        self.end = min(self.began + check.limit_seconds, end)
        self.cut_short = end < self.began + check.limit_seconds
        context = multiprocessing.get_context(place.method)
        self.process = context.Process(target=in_child, args=(check, self.place))
        self.process.start()

    @property
    def is_over(self) -> bool:
        return self.process.exitcode is not None or time.monotonic() >= self.end

    def stop(self) -> None:
        """End what is left of it: the process, and those that it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.join()

    def finish(self) -> dict[str, Any] | None:
        """Its entry in results.json; None if --minutes ended it before its own limit."""
        was_stopped = self.process.exitcode is None
        self.stop()
        if was_stopped and self.cut_short:
            return None
        log, answer = self.place.log, self.place.folder / "finding.json"
        if answer.is_file():
            finding = Finding(**json.loads(answer.read_text()))
        elif was_stopped:
            finding = Finding("", problems=[f"not finished after {self.check.limit_seconds} s"])
        else:
            finding = Finding("", problems=[f"ended with exit code {self.process.exitcode}"])
        result = {
            "status": "failed" if finding.problems else "passed",
            "seconds": round(time.monotonic() - self.began, 1),
            "summary": finding.summary,
            "problems": finding.problems,
            "figures": finding.figures,
        }
        if finding.problems and log.is_file():
            result["output_tail"] = log.read_text(errors="replace").splitlines()[-TAIL_LINES:]
        for problem in finding.problems:
            print(f"{self.name}: FAILED: {problem}", flush=True)
        shutil.rmtree(self.place.folder)
        return result


def in_child(check: Check, place: Place) -> None:
    os.setpgrp()  # one group with the processes that it starts, to be killed together
    log = os.open(place.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        finding = check.work(place)
    except Exception as error:  # whatever it is, the other checks still run
        traceback.print_exc()
        finding = Finding("", problems=[f"{type(error).__name__}: {error}".splitlines()[0]])
    (place.folder / "finding.json").write_text(json.dumps(vars(finding)))


def write_report(out: Path, report: dict[str, Any]) -> None:
    """Replace both files, so that whoever reads them finds whole ones."""
    draft = out / "results.json.tmp"
    draft.write_text(json.dumps(report, indent=1) + "\n")
    os.replace(draft, out / "results.json")
    with (out / "table.txt").open("w") as file:
        Console(file=file, width=WIDTH).print(table_of(report))


def table_of(report: dict[str, Any]) -> Table:
    title = "toy sizes, on CPU: the figures mean nothing" if report["toy"] else None
    table = Table("check", "", "s", "result", title=title)
    for check in CHECKS:
        result = report["checks"].get(check.name, {})
        text = "\n".join(filter(None, [result.get("summary", ""), *result.get("problems", [])]))
        seconds = f"{result['seconds']:.0f}" if result else ""
        table.add_row(check.name, SHOWN[result.get("status")], seconds, text)
    return table


if __name__ == "__main__":
    exit_on_error(main)
