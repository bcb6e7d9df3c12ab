"""The exception for a user's mistake, and the exit codes of every command.

Exit codes: 0 finished, or stopped by its user and saved, 2 a user's mistake, 75 preempted and saved
(the same command resumes), 130 Ctrl-C, 143 SIGTERM and 138 SIGUSR1 (128 + the signal, as a shell
reports it) with nothing to save or without the time to, 1 anything else, such as a full disk.
"""

import difflib
import re
import socket
import sys
import textwrap
import time
import traceback
from collections.abc import Callable, Sequence
from typing import TypeVar

from zerotrain.runtime.rank_env import rank_variables

T = TypeVar("T")

EXIT_FAILURE = 1
EXIT_USER_MISTAKE = 2
EXIT_PREEMPTED = 75  # sysexits.h: EX_TEMPFAIL, try again later
EXIT_INTERRUPTED = 130


# PLACE: KEY: PROBLEM; each of the two may be missing. A rank's prefix may come first.
WHERE = re.compile(
    r"(?:\[rank .*?\] )?(?:error: )?"
    r"(?:(?P<place>command line|\S*(?:/|:\d|\.json|\.yaml)\S*): )?"
    r"(?:(?P<key>[\w.-]+): )?"
)


class UserError(Exception):
    """Bad input. `str(error)` is the one line that the user sees: PLACE: KEY: what is wrong; what
    to do.
    """

    exit_code = EXIT_USER_MISTAKE

    def __str__(self) -> str:
        return printable(super().__str__())

    @property
    def place(self) -> str | None:
        """FILE:LINE, FILE or `command line`, as the message names it."""
        return WHERE.match(str(self))["place"]

    @property
    def key(self) -> str | None:
        """The setting that is wrong, such as train.seed, as the message names it."""
        return WHERE.match(str(self))["key"]


class EnvironmentFailure(UserError):
    """What the user cannot have mistyped, such as a full disk or a lost lock: one line too, but
    launchers may start the run again.
    """

    exit_code = EXIT_FAILURE


class AgreedError(UserError):
    """A UserError that is raised on all ranks, so that rank 0 alone reports it."""


class RunFailed(AgreedError):
    """A run that cannot continue although its input was accepted, such as one that diverges."""

    exit_code = EXIT_FAILURE


def disk_error(error: OSError) -> type[UserError]:
    """UserError for a path that is wrong or forbidden, EnvironmentFailure for a full or failing
    disk.
    """
    wrong = (PermissionError, FileNotFoundError, NotADirectoryError, FileExistsError)
    return UserError if isinstance(error, wrong) else EnvironmentFailure


def describe(error: Exception) -> str:
    """The message of an error in one line, without the errno and repr that Python adds."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return " ".join(str(error).split()) or type(error).__name__


def first_of(names: Sequence[object]) -> str:
    """The first three of some names, and "..." if there are more, for a message."""
    more = " ..." if len(names) > 3 else ""
    return ", ".join(map(str, names[:3])) + more


def similar(name: str, names: Sequence[str]) -> str:
    """The most similar of names, for a message about an unknown one; "" if none is."""
    near = difflib.get_close_matches(name, names, n=1)
    return f", or did you mean {near[0]}?" if near else ""


def printable(text: str) -> str:
    """The text with control characters, which a terminal would obey, written out as escapes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def rank_prefix() -> str:
    """ "[rank 12 @ host-3] ", which begins a line about this rank; "" if it is the only one."""
    ranks = rank_variables()
    if ranks["WORLD_SIZE"] == "1":
        return ""
    return f"[rank {ranks['RANK']} @ {socket.gethostname()}] "


def exit_on_error(work: Callable[[], T]) -> T:
    """Return `work()`, or exit: with one line for a UserError, with a traceback for anything else.
    What ranks other than 0 print of it, and tracebacks of all of them, carry the rank's prefix.

    From here on lines on standard output are written at once, as they are on standard error.
    """
    # into a file or a pipe they would wait in a buffer, and be lost if the process is killed
    sys.stdout.reconfigure(line_buffering=True)
    try:
        return work()
    except UserError as mistake:
        _report(mistake)
        sys.exit(mistake.exit_code)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    except Exception:
        text = textwrap.indent(traceback.format_exc(), rank_prefix(), bool)  # every line
        print(text, end="", file=sys.stderr)
        sys.exit(EXIT_FAILURE)


def _report(mistake: UserError) -> None:
    """Print the line of a UserError once per run if it is agreed, otherwise once per node.

    The processes that do not print it at once wait some seconds, because a launcher stops all
    processes as soon as one has failed, and the line must be printed before that. Those that are
    still running then have an error of their own.
    """
    ranks = rank_variables()
    line = f"error: {mistake}"
    is_agreed = isinstance(mistake, AgreedError)
    if ranks["RANK"] != "0":
        line = rank_prefix() + line
        if is_agreed or ranks["LOCAL_RANK"] != "0":
            time.sleep(3)
        if is_agreed:
            return
    print(line, file=sys.stderr)
