"""One run at a time in an output folder; a dead run does not hold it forever."""

import os
import time
from contextlib import suppress
from pathlib import Path

from filelock import LeaseSettingsMismatch, SoftFileLease, Timeout

from zerotrain.checkpoint.run_folder import LOCK
from zerotrain.runtime.errors import EnvironmentFailure, UserError

LEASE_SECONDS = 20.0  # a shared disk may be slow to show a refreshed lock to another host
OUT_OF_REACH_SECONDS = 30  # after which a save fails


class RunLock(SoftFileLease):
    """`folder`/run.lock, held within `with`: a lease that names its process and is refreshed every
    third of LEASE_SECONDS.

    An existing lock is watched. If it is not refreshed for LEASE_SECONDS, or its process no longer
    exists on this host, its run is dead and the lock is taken over. The clocks of two hosts are
    never compared, and the operating system's file locks, which shared disks often lack, are not
    used.

    No lease can tell a dead run from one that is stopped for longer than that, by SIGSTOP or a
    hanging disk. So a run checks its lock each time before it writes into the folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        super().__init__(
            folder / LOCK,
            lease_duration=LEASE_SECONDS,
            # long enough to see that a dead run's lock is not refreshed
            timeout=1.5 * LEASE_SECONDS,
            # the thread that refreshes it holds it too
            thread_local=False,
            poll_interval=0.2,
        )

    def __enter__(self) -> None:
        """Raises UserError: another run uses the folder, or run.lock is not a lock."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if os.path.lexists(self.lock_file):
            print(f"{self.lock_file}: waiting for {self._holder()} to end")
        try:
            super().__enter__()
        except (Timeout, LeaseSettingsMismatch, IsADirectoryError) as error:
            if self.owner is None and isinstance(error, Timeout):
                # empty, as a power cut leaves it: filelock takes over only what names its owner
                self.break_lock()
                return self.__enter__()
            raise UserError(
                f"output_dir {self.folder} is in use by another run ({self._holder()}); choose "
                f"another output_dir, or stop that run; if there is none, remove {self.lock_file}"
            ) from None

    def is_lost(self) -> bool:
        """Whether another run has taken the lock that this process held. False in a process that
        has never held it.
        """
        if self.token is None:
            return False
        owner = self.owner
        if owner is not None:
            return owner.token != self.token
        with suppress(OSError):  # the folder is out of reach for a moment
            return self.folder / LOCK not in self.folder.iterdir()  # removed
        return False

    def check(self) -> None:
        """Raise EnvironmentFailure if the lock is lost. A folder that is out of reach, as while a
        file server restarts, is waited for.
        """
        for _ in range(OUT_OF_REACH_SECONDS):
            if self.is_lost():
                raise EnvironmentFailure(
                    f"output_dir {self.folder} now belongs to another run ({self._holder()}): this "
                    f"one was stopped for over {LEASE_SECONDS:.0f} s; nothing more is written"
                )
            if self.token is None or os.path.lexists(self.lock_file):
                return
            time.sleep(1)

    def _holder(self) -> str:
        owner = self.owner
        if owner is None:
            return "another process"
        # filelock appends the namespace of process numbers to the host name after a "?"
        return f"process {owner.pid} on {owner.hostname.split('?')[0]}"
