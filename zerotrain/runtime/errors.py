"""The exception for a user's mistake, and the exit codes of every command.

Exit codes:

    0         finished, or stopped by its user and saved
    1         any other failure, such as a full disk
    2         a user's mistake
    75        preempted and saved; the same command resumes
    130       Ctrl-C
    143, 138  SIGTERM, SIGUSR1 with nothing to save, or without the time to save
"""

import difflib
import os
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
MAX_CHARACTERS = 2000
"""Characters of a message. A file of a stranger may have keys and names of any length."""


# The start of a message: `PLACE: KEY: `, where both may be missing. rank_prefix() may come first.
WHERE = re.compile(
    r"(?:error: |\[rank .*?\] )*"
    r"(?:(?P<place>command line|\S*(?:/|:\d|\.json|\.yaml)\S*): )?"
    r"(?:(?P<key>[\w.-]+)(?: \(\w+\))?: )?"
)


class UserError(Exception):
    """Bad input. `str(error)` is the one line that the user sees, in the form
    `PLACE: KEY: what is wrong; what to do`.

    Attributes:
        place: FILE:LINE, FILE or `command line`, as the message names it, or None.
        key: the setting that is wrong, such as train.seed, as the message names it, or None.
    """

    exit_code = EXIT_USER_MISTAKE

    def __init__(self, message: str) -> None:
        message = printable(message)
        if len(message) > MAX_CHARACTERS:  # its end says what to do
            message = f"{message[: MAX_CHARACTERS // 2]} ... {message[5 - MAX_CHARACTERS // 2 :]}"
        super().__init__(message)
        self.place, self.key = WHERE.match(message).groups()


class EnvironmentFailure(UserError):
    """A failure that no user can have typed, such as a full disk or a lost lock. It is one line
    too, but launchers may start the run again.
    """

    exit_code = EXIT_FAILURE


class AgreedError(UserError):
    """A UserError that all ranks raise, so that rank 0 alone reports it."""


class RunFailed(AgreedError):
    """The run cannot continue although its input was accepted, for example because it diverges."""

    exit_code = EXIT_FAILURE


def disk_error(error: OSError) -> type[UserError]:
    """Return the class to raise: UserError for a path that is wrong or forbidden,
    EnvironmentFailure for a full or failing disk.
    """
    wrong = (PermissionError, FileNotFoundError, NotADirectoryError, FileExistsError)
    return UserError if isinstance(error, wrong) else EnvironmentFailure


def describe(error: Exception) -> str:
    """Return an error's message in one line, without the errno and repr that Python adds."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return " ".join(str(error).split()) or type(error).__name__


def first_of(names: Sequence[object]) -> str:
    """Return the first three names, and "..." if there are more, for a message."""
    shown = ", ".join(map(str, names[:3]))
    return f"{shown} ..." if len(names) > 3 else shown


def similar(name: str, names: Sequence[str]) -> str:
    """Return a question that names the most similar name, for a message about an unknown one; ""
    if there is none.
    """
    near = difflib.get_close_matches(name, names, n=1)
    return f", or did you mean {near[0]}?" if near else ""


def printable(text: str) -> str:
    """Return the text with control characters, which a terminal would obey, as escapes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def rank_prefix() -> str:
    """Return the start of a line about this rank, `[rank 12 @ host-3] `; "" for the only rank."""
    ranks = rank_variables()
    if ranks["WORLD_SIZE"] == "1":
        return ""
    return f"[rank {ranks['RANK']} @ {socket.gethostname()}] "


def exit_on_error(work: Callable[[], T]) -> T:
    """Return `work()`, or exit: with one line for a UserError, with a traceback for any other
    error. Tracebacks, and the lines of ranks other than 0, begin with rank_prefix().

    From here on, standard output is written line by line, as standard error is.
    """
    # In a file or a pipe, buffered lines would be lost if the process is killed.
    sys.stdout.reconfigure(line_buffering=True)
    try:
        return work()
    except UserError as mistake:
        _report(mistake)
        sys.exit(mistake.exit_code)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    except BrokenPipeError:  # The reader has ended, as `| head` does.
        os._exit(EXIT_FAILURE)
    except Exception:
        # bool: indent empty lines too
        text = textwrap.indent(traceback.format_exc(), rank_prefix(), bool)
        print(text, end="", file=sys.stderr)
        sys.exit(EXIT_FAILURE)


def _report(mistake: UserError) -> None:
    """Print the line of a UserError: once per run if all ranks have agreed on it, otherwise from
    the first rank of each node and, 3 s later, from its other ranks.

    A launcher stops all processes as soon as one has failed, so the others must not exit before the
    line is printed. A process that still runs after 3 s has an error of its own.
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
