"""What libraries print."""

import io
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path

import psutil

from zerotrain.runtime.errors import rank_prefix

LIBRARY_LOGS = "LIBRARY_LOGS"
"""Environment variable: a level of logging, e.g. INFO, from which on all ranks print what libraries
log, and what they print at start-up.
"""


@contextmanager
def prints_hidden() -> Iterator[None]:
    """Hide what is printed inside on standard output: DeepSpeed prints its use of memory in 15
    lines where the model is in bf16 at ZeRO stage 1.
    """
    if os.environ.get(LIBRARY_LOGS):
        yield
        return
    with redirect_stdout(io.StringIO()):
        yield


@contextmanager
def locks_named(after_seconds: float = 30.0) -> Iterator[None]:
    """Where work inside takes long, name the locks of compiled extensions that nobody holds: a
    compile that was killed leaves its `lock`, for which every later start waits without a word.
    """

    def warn() -> None:
        from torch.utils.cpp_extension import get_default_build_root  # imports torch

        root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
        held = {
            file.path
            for process in psutil.process_iter(["open_files"])
            for file in process.info["open_files"] or ()
        }
        for lock in (*root.glob("*/lock"), *root.glob("*/*/lock")):
            if str(lock) not in held:
                print(
                    f"{rank_prefix()}waiting for {lock}, which no process on this host has open: "
                    "if no other host compiles there, remove it",
                    file=sys.stderr,
                    flush=True,
                )

    timer = threading.Timer(after_seconds, warn)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
