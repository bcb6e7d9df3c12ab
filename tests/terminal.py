"""A terminal for tests: a pty, and what would be on its screen."""

import codecs
import fcntl
import os
import pty
import re
import select
import struct
import sys
import termios
import time
import traceback

CODES = re.compile(r"\x1b\[(\??)([\d;]*)([A-Za-z])|(.)", re.DOTALL)
CUT = re.compile(r"\x1b[^A-Za-z]*$")  # a code whose end is still to be read
ROWS = 40


class Screen:
    """Lines of text as control codes leave them, scrolled-off ones included."""

    def __init__(self, columns: int) -> None:
        self.columns, self.row, self.column = columns, 0, 0
        self.cells: list[list[str]] = [[]]
        self.erased: list[str] = []
        self.wraps = 0  # characters that did not fit into a line
        self.cursor_hidden = False

    @property
    def lines(self) -> list[str]:
        return ["".join(cells).rstrip() for cells in self.cells]

    def feed(self, text: str) -> None:
        for private, numbers, command, character in CODES.findall(text):
            if character:
                self._put(character)
            elif command == "A":
                assert self.row >= int(numbers or 1), "above the first line"
                self.row -= int(numbers or 1)
            elif command == "K":
                assert numbers == "2"
                self.erased.append("".join(self.cells[self.row]))
                self.cells[self.row] = []
            elif private and numbers == "25":
                self.cursor_hidden = command == "l"
            else:
                assert command == "m", f"{private}{numbers}{command}"

    def _put(self, character: str) -> None:
        if character == "\r":
            self.column = 0
            return
        if character != "\n":
            if self.column == self.columns:
                self.wraps += 1
                self._down()
                self.column = 0
            cells = self.cells[self.row]
            cells += " " * (self.column + 1 - len(cells))
            cells[self.column] = character
            self.column += 1
            return
        self._down()

    def _down(self) -> None:
        self.row += 1
        while len(self.cells) <= self.row:
            self.cells.append([])


class Terminal:
    """A pty of a width. Read it while something writes to it."""

    def __init__(self, columns: int) -> None:
        self.master, self.slave = pty.openpty()
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("4H", ROWS, columns, 0, 0))
        self.name, self.screen = os.ttyname(self.slave), Screen(columns)
        self.settings = termios.tcgetattr(self.slave)
        self._decoder, self._unread = codecs.getincrementaldecoder("utf-8")(), ""

    def read(self, seconds: float = 0.0) -> None:
        """Draw what has been written, and is written within that time."""
        while select.select([self.master], [], [], seconds)[0]:
            self._unread += self._decoder.decode(os.read(self.master, 1 << 20))
            whole = self._unread.rpartition("\x1b")[0] if CUT.search(self._unread) else self._unread
            self.screen.feed(whole)
            self._unread = self._unread[len(whole) :]

    def until(self, happened, seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while not happened():
            assert time.monotonic() < deadline, "\n".join(self.screen.lines)
            self.read(0.02)
        self.read(0.02)

    def run(self, work) -> int:
        """Call `work()` in a process of its own on this terminal; returns its exit code."""
        if (pid := os.fork()) == 0:
            code = 1
            try:
                for size in ("COLUMNS", "LINES"):  # exported by readline, and preferred by rich
                    os.environ.pop(size, None)
                for fd in (0, 1, 2):
                    os.dup2(self.slave, fd)
                sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w", buffering=1)
                work()
                sys.stdout.flush()
                code = 0
            except SystemExit as end:
                code = end.code
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        status: list[int] = []

        def ended() -> bool:
            done, value = os.waitpid(pid, os.WNOHANG)
            status.extend([value] if done else [])
            return bool(done)

        self.until(ended)
        return os.waitstatus_to_exitcode(status[0])

    def close(self) -> None:
        os.close(self.master)
        os.close(self.slave)
