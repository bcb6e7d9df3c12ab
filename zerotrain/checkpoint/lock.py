"""Let one run at a time use an output folder, and take the folder over from a dead run."""

import os
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from filelock import LeaseSettingsMismatch, SoftFileLease, Timeout

from zerotrain.checkpoint.run_folder import LOCK
from zerotrain.runtime.errors import EnvironmentFailure, UserError

# A shared disk may be slow to show a refreshed lock to another host.
LEASE_SECONDS = 20.0
OUT_OF_REACH_SECONDS = 30
"""How long a save waits for a folder that is out of reach, as while a file server restarts."""
REPORT_SECONDS = 60.0
"""Time between two lines that say that the folder is gone."""


class RunLock(SoftFileLease):
    """`folder`/run.lock, held within `with`. It names its process, which refreshes it every third
    of LEASE_SECONDS.

    If an existing lock is not refreshed for LEASE_SECONDS, or its process no longer exists on this
    host, its run is dead and the lock is taken over. The clocks of two hosts are never compared.
    The operating system's file locks are not used, because many shared disks lack them.

    A lease cannot tell a dead run from one that is stopped for longer, by SIGSTOP or a hanging
    disk. So a run checks its lock each time before it writes into the folder.

    A thread looks at the lock after each refresh. A lock that somebody has removed is
    taken again, unless this process was stopped for so long that a different run may have had it
    meanwhile. A folder that is removed, renamed or out of reach is reported, and a save makes
    it again.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        super().__init__(
            folder / LOCK,
            lease_duration=LEASE_SECONDS,
            # longer than a lease, to see that a dead run's lock is not refreshed
            timeout=1.5 * LEASE_SECONDS,
            # The thread that refreshes the lock holds it too.
            thread_local=False,
            poll_interval=0.2,
        )
        self._mine = None
        """The token of this process's lock, also while the lock is removed."""
        self._is_lost = False
        self._gone_since = self._reported = None
        self._looking = threading.RLock()
        self._end = threading.Event()

    def __enter__(self) -> None:
        """Raises UserError: another run uses the folder, or run.lock is not a lock."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if os.path.lexists(self.lock_file):
            print(f"{self.lock_file}: waiting for {self._holder()} to end")
        try:
            super().__enter__()
        except (Timeout, LeaseSettingsMismatch, IsADirectoryError) as error:
            if self.owner is None and isinstance(error, Timeout):
                # A power cut leaves an empty file. filelock takes over only a lock with an owner.
                self.break_lock()
                return self.__enter__()
            raise UserError(
                f"output_dir: {self.folder} is in use by another run ({self._holder()}); choose "
                f"another output_dir, or stop that run; if it has ended, remove {self.lock_file}"
            ) from None
        self._mine = self.token
        self._looked = time.monotonic()
        self._real = self.folder.resolve()
        self._disk = self._real.stat().st_dev
        self._disk_around = self._real.parent.stat().st_dev
        threading.Thread(target=self._watch, daemon=True).start()

    def __exit__(self, *error: Any) -> None:
        self._end.set()
        with self._looking:
            super().__exit__(*error)

    def _watch(self) -> None:
        while not self._end.wait(self.lease_duration / 3):
            self.is_lost()

    def is_lost(self) -> bool:
        """Return whether a different run has this process's lock, or may have had it; False if this
        process never held one. Take a removed lock again, and report a folder that is gone.
        """
        if self._mine is None or self._is_lost:
            return self._is_lost
        with self._looking:
            now = time.monotonic()
            was_stopped = now - self._looked > self.lease_duration
            self._looked = now
            owner = self.owner
            is_there = owner is not None or self._is_there()
            self._report(is_there, now)
            if owner is not None and owner.token != self._mine:
                self._is_lost = True
            elif owner is not None:
                if self.compromise is not None:  # the folder was out of reach: nothing refreshes it
                    self._take_again()
            elif is_there and not os.path.lexists(self.lock_file):
                self._is_lost = was_stopped
                if not was_stopped and self._take_again():
                    print(f"WARNING: {self.lock_file} was removed, and is taken again")
            return self._is_lost

    def check(self) -> None:
        """Raise EnvironmentFailure if the lock is lost. Wait while the folder is out of reach. Make
        it again if it was removed or renamed, and is not back in time.
        """
        began = time.monotonic()
        while self._mine is not None:
            if self.is_lost():
                cause = (
                    f"is not there after this run was stopped for over {self.lease_duration:.0f} s"
                    if self.owner is None
                    else f"belongs to another run ({self._holder()})"
                )
                raise EnvironmentFailure(
                    f"output_dir: {self.lock_file} {cause}; this run writes nothing more"
                )
            if os.path.lexists(self.lock_file):
                return
            if time.monotonic() - (self._gone_since or began) >= OUT_OF_REACH_SECONDS:
                self._make_again()
            else:
                time.sleep(1)

    def _is_there(self) -> bool:
        """Return whether the folder can be read, and is on the disk where it was."""
        with suppress(OSError):
            next(self.folder.iterdir(), None)
            return self.folder.stat().st_dev == self._disk
        return False

    def _is_removed(self) -> bool:
        """Return whether the folder is missing, and the folder around it is not."""
        with suppress(OSError):
            parent = self._real.parent.stat().st_dev
            return not os.path.lexists(self._real) and parent == self._disk_around
        return False

    def _report(self, is_there: bool, now: float) -> None:
        if is_there:
            if self._gone_since is not None:
                print(f"output_dir: {self.folder} is there again")
            self._gone_since = None
        elif self._gone_since is None or now - self._reported >= REPORT_SECONDS:
            self._gone_since = self._gone_since or now
            self._reported = now
            state = "is out of reach; training continues, and a save waits for it"
            if self._is_removed():
                state = (
                    "was removed or renamed; training continues: move it back, or the next save "
                    "makes a new one"
                )
            print(f"WARNING: output_dir: {self.folder} {state}")

    def _take_again(self) -> bool:
        """Return whether this process has the lock again."""
        with suppress(Timeout, OSError):  # a different run was faster, or the disk is full
            self.release(force=True)
            self.acquire(timeout=0)
            self._mine = self.token
            return True
        return False

    def _make_again(self) -> None:
        """Make a removed folder again, for a save.

        Raises:
            EnvironmentFailure: it is out of reach, or takes no lock.
        """
        if not self._is_removed():
            raise EnvironmentFailure(
                f"output_dir: {self.folder} is out of reach, or {LOCK} cannot be written there"
            )
        self._real.mkdir()
        print(f"WARNING: output_dir: {self.folder} is made again, without its earlier checkpoints")

    def _holder(self) -> str:
        owner = self.owner
        if owner is None:
            return "another process"
        # filelock appends "?" and the namespace of process numbers to the host name.
        return f"process {owner.pid} on {owner.hostname.split('?')[0]}"
