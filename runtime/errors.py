"""The exception for a user's mistake, and the exit codes of every command.

Exit codes: 0 finished, 2 a user's mistake, 75 preempted and saved (the same command resumes),
130 Ctrl-C, 143 SIGTERM and 138 SIGUSR1 before there was anything to save, 1 anything else.
"""

import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import TypeVar

from runtime.rank_env import rank_variables

T = TypeVar("T")

EXIT_FAILURE = 1
EXIT_USER_MISTAKE = 2
EXIT_PREEMPTED = 75  # sysexits.h: EX_TEMPFAIL, try again later
EXIT_INTERRUPTED = 130


def exit_code_of_signal(number: int) -> int:
    """128 + number, as a shell reports it."""
    return 128 + number


class UserError(Exception):
    """Bad input. `str(error)` is the one line that the user sees: what is wrong, where, and what
    to do about it.
    """

    exit_code = EXIT_USER_MISTAKE


class RunFailed(UserError):
    """A run that cannot go on although its input was accepted, such as one that diverges."""

    exit_code = EXIT_FAILURE


def describe(error: Exception) -> str:
    """The message of an error in one line, without the errno and repr that Python adds."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return " ".join(str(error).split()) or type(error).__name__


def exit_on_error(work: Callable[[], T]) -> T:
    """Return `work()`, or exit: with one line for a UserError, with a traceback for anything else.

    Under a launcher one process per machine prints the line and the others wait some seconds,
    because a launcher stops all processes as soon as one has failed, and the line must be printed
    before that.
    """
    try:
        return work()
    except UserError as mistake:
        if rank_variables(os.environ).get("LOCAL_RANK", "0") == "0":
            print(f"error: {mistake}", file=sys.stderr, flush=True)
        else:
            time.sleep(3)
        sys.exit(mistake.exit_code)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    except Exception:
        traceback.print_exc()
        sys.exit(EXIT_FAILURE)
