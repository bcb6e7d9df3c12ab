"""Let one run at a time use an output folder, and take the folder over from a dead run."""

import os
import time
from contextlib import suppress
from pathlib import Path

from filelock import LeaseSettingsMismatch, SoftFileLease, Timeout

from zerotrain.checkpoint.run_folder import LOCK
from zerotrain.runtime.errors import EnvironmentFailure, UserError

# A shared disk may be slow to show a refreshed lock to another host.
LEASE_SECONDS = 20.0
OUT_OF_REACH_SECONDS = 30
"""How long a save waits for a folder that is out of reach, as while a file server restarts."""


class RunLock(SoftFileLease):
    """`folder`/run.lock, held within `with`. It names its process, which refreshes it every third
    of LEASE_SECONDS.

    If an existing lock is not refreshed for LEASE_SECONDS, or its process no longer exists on this
    host, its run is dead and the lock is taken over. The clocks of two hosts are never compared.
    The operating system's file locks are not used, because many shared disks lack them.

    A lease cannot tell a dead run from one that is stopped for longer, by SIGSTOP or a hanging
    disk. So a run checks its lock each time before it writes into the folder.
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

    def is_lost(self) -> bool:
        """Return whether another run has taken this process's lock; False if it never held one."""
        if self.token is None:
            return False
        owner = self.owner
        if owner is not None:
            return owner.token != self.token
        with suppress(OSError):  # the folder may be out of reach for a moment
            return self.folder / LOCK not in self.folder.iterdir()
        return False

    def check(self) -> None:
        """Raise EnvironmentFailure if the lock is lost. Wait while the folder is out of reach."""
        for _ in range(OUT_OF_REACH_SECONDS):
            if self.is_lost():
                raise EnvironmentFailure(
                    f"output_dir: {self.folder} now belongs to another run ({self._holder()}); "
                    f"this run was stopped for over {LEASE_SECONDS:.0f} s, and writes nothing more"
                )
            if self.token is None or os.path.lexists(self.lock_file):
                return
            time.sleep(1)

    def _holder(self) -> str:
        owner = self.owner
        if owner is None:
            return "another process"
        # filelock appends "?" and the namespace of process numbers to the host name.
        return f"process {owner.pid} on {owner.hostname.split('?')[0]}"
