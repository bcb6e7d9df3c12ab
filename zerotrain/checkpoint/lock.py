"""One run at a time in an output folder; a dead run does not hold it forever."""

import errno
import os
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from filelock import LeaseSettingsMismatch, SoftFileLease, Timeout

from zerotrain.checkpoint.run_folder import LOCK
from zerotrain.runtime.errors import EnvironmentFailure, UserError

HEARTBEAT_SECONDS = 5.0
LEASE_SECONDS = 20.0  # four heartbeats: a shared disk may be slow to show one to another host
POLL_SECONDS = 0.2
DISK_FAILURES = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE)


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
        self._path = folder / LOCK
        self._lease = SoftFileLease(
            self._path,
            lease_duration=LEASE_SECONDS,
            heartbeat_interval=HEARTBEAT_SECONDS,
            poll_interval=POLL_SECONDS,
        )
        self._token: str | None = None  # of the claim; set while this process holds the lock
        self._made: tuple[int, int] | None = None  # the identity of this process's lock
        self._ours_at = 0.0  # when the lock was last seen to be this process's
        self._first: os.stat_result | None = None  # another run's lock when it was first seen

    def __enter__(self) -> str:
        """Acquire the lock, and return a text that only this claim's file contains.

        Raises:
            UserError: another run uses the folder, or the folder cannot be written to.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._acquire(3 * LEASE_SECONDS)
            self.check()  # the disk may have been slow to write it
        except Timeout:
            raise UserError(
                f"output_dir {self.folder} is in use by another run ({self._holder()}); choose "
                "another output_dir, or stop that run; with checkpoint.node_local each node needs "
                "a disk of its own"
            ) from None
        except LeaseSettingsMismatch:
            raise UserError(
                f"{self._path} is held by {self._holder()}, which has other settings of the lock; "
                "use the same version of this code, or remove the file if that run is dead"
            ) from None
        except OSError as error:
            where = f"{error.filename}: " if error.filename else ""
            kind = EnvironmentFailure if error.errno in DISK_FAILURES else UserError
            raise kind(
                f"output_dir: cannot write {self.folder}: {where}{error.strerror}"
            ) from error
        if self._first is not None:
            print(f"{self._path}: its run is dead; taking over", flush=True)
        return self._token or ""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._token = None
        self._lease.release()  # another run's lock is left alone

    def is_lost(self) -> bool:
        """Whether the lock that this process held is no longer its own. False in a process that has
        never held it.

        A lock that cannot be read is still this process's if it is the file that it made: another
        run makes a new one. If that cannot be told either, it is asked for again, as long as a
        lease lasts: a disk may not answer for a moment. One that was removed is taken again if
        nobody else can have had it.
        """
        if self._token is None:
            return False
        began = time.monotonic()
        owner = self._lease.owner
        while owner is None and time.monotonic() - began < LEASE_SECONDS:
            if self._made is not None and self._identity() == self._made:
                self._ours_at = time.monotonic()
                return False
            time.sleep(POLL_SECONDS)
            owner = self._lease.owner
        is_removed = owner is None and not os.path.lexists(self._path)
        if is_removed and began - self._ours_at < LEASE_SECONDS:
            with suppress(OSError, Timeout):
                self._lease.release()
                self._acquire(0)
                owner = self._lease.owner
                print(f"WARNING: {self._path} was removed; this run has it again", flush=True)
        is_ours = owner is not None and owner.token == self._token
        if is_ours:
            self._ours_at = time.monotonic()
        return not is_ours

    def check(self) -> None:
        """Raise EnvironmentFailure if the lock is lost."""
        if not self.is_lost():
            return
        why = f"{self._path} cannot be read"
        if self._lease.owner is not None:
            why = f"output_dir {self.folder} now belongs to another run ({self._holder()})"
        raise EnvironmentFailure(
            f"{why}: this run was stopped, or its disk did not answer, for over "
            f"{LEASE_SECONDS:.0f} s; nothing more is written"
        )

    def _acquire(self, timeout_seconds: float) -> None:
        self._lease.acquire(timeout=timeout_seconds, cancel_check=self._is_refreshed)
        self._token = self._lease.token
        self._made = self._identity()
        self._ours_at = time.monotonic()

    def _identity(self) -> tuple[int, int] | None:
        """Device and inode of the lock; None if it is not there or the disk does not answer. The
        holder has its file open, so that no other one gets the same inode.
        """
        try:
            status = self._path.lstat()
        except OSError:
            return None
        return status.st_dev, status.st_ino

    def _is_refreshed(self) -> bool:
        try:
            now = self._path.stat()
        except FileNotFoundError:
            return False
        if self._first is None:
            self._first = now
            holder = self._holder()
            print(f"{self._path} is held by {holder}; checking whether it is alive", flush=True)
        return (now.st_ino, now.st_mtime_ns) != (self._first.st_ino, self._first.st_mtime_ns)

    def _holder(self) -> str:
        owner = self._lease.owner
        if owner is None:
            return "another process"
        # filelock appends the namespace of process numbers to the host name after a "?"
        return f"process {owner.pid} on {owner.hostname.split('?')[0]}"
