"""What libraries print."""

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout

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
