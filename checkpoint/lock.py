"""One run at a time in an output folder; a dead run does not hold it forever."""

import os
import time
from pathlib import Path
from types import TracebackType

from filelock import LeaseSettingsMismatch, SoftFileLease, Timeout

from checkpoint.run_folder import LOCK
from runtime.errors import UserError

HEARTBEAT_SECONDS = 5.0
LEASE_SECONDS = 20.0  # four heartbeats: a shared disk may be slow to show one to another host
POLL_SECONDS = 0.2


class RunLock:
    """`folder`/run.lock, held within `with`: a lease that names its process and is refreshed every
    5 s.

    An existing lock is watched. If it is refreshed, its run is alive. If it is not refreshed for
    20 s, or its process no longer exists on this host, its run is dead and the lock is taken over.
    The clocks of two hosts are never compared, and the operating system's file locks, which shared
    disks often lack, are not used.

    No lease can tell a dead run from one that is stopped for longer than that, by SIGSTOP or a
    hanging disk. So a run asks `is_lost` each time before it writes into the folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lease = SoftFileLease(
            folder / LOCK,
            lease_duration=LEASE_SECONDS,
            heartbeat_interval=HEARTBEAT_SECONDS,
            poll_interval=POLL_SECONDS,
        )
        self._token: str | None = None  # of the claim; set while this process holds the lock
        self._first: os.stat_result | None = None  # another run's lock when it was first seen

    def __enter__(self) -> None:
        """Acquire the lock.

        Raises:
            UserError: another run uses the folder, or the folder cannot be written to.
        """
        path = self.folder / LOCK
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lease.acquire(timeout=3 * LEASE_SECONDS, cancel_check=self._is_refreshed)
            self._token = self._lease.token
            self.check()  # the disk may have been slow to write it
        except Timeout:
            raise UserError(
                f"output_dir {self.folder} is in use by another run ({self._holder()}); choose "
                "another output_dir, or stop that run"
            ) from None
        except LeaseSettingsMismatch:
            raise UserError(
                f"{path} is held by {self._holder()}, which has other settings of the lock; use "
                "the same version of this code, or remove the file if that run is dead"
            ) from None
        except OSError as error:
            where = f"{error.filename}: " if error.filename else ""
            raise UserError(
                f"output_dir: cannot write {self.folder}: {where}{error.strerror}"
            ) from error
        if self._first is not None:
            print(f"{path}: its run is dead; taking over", flush=True)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._token = None
        self._lease.release()  # another run's lock is left alone

    def is_lost(self) -> bool:
        """Whether another run has taken over the lock that this process held. False in a process
        that has never held it.
        """
        if self._token is None:
            return False
        if (owner := self._lease.owner) is None:
            time.sleep(POLL_SECONDS)  # a run that looks for a dead one moves it for an instant
            owner = self._lease.owner
        return owner is None or owner.token != self._token

    def check(self) -> None:
        """Raise UserError if the lock is lost."""
        if self.is_lost():
            raise UserError(
                f"output_dir {self.folder} now belongs to another run ({self._holder()}): this one "
                f"was stopped, or its disk did not answer, for over {LEASE_SECONDS:.0f} s; nothing "
                "more is written"
            )

    def _is_refreshed(self) -> bool:
        path = self.folder / LOCK
        try:
            now = path.stat()
        except FileNotFoundError:
            return False
        if self._first is None:
            self._first = now
            print(f"{path} is held by {self._holder()}; checking whether it is alive", flush=True)
        return (now.st_ino, now.st_mtime_ns) != (self._first.st_ino, self._first.st_mtime_ns)

    def _holder(self) -> str:
        owner = self._lease.owner
        if owner is None:
            return "another process"
        # filelock appends the namespace of process numbers to the host name after a "?"
        return f"process {owner.pid} on {owner.hostname.split('?')[0]}"
