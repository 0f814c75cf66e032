"""One job a run folder: two would delete each other's checkpoints and first errors."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rlbatch.api import ConfigError

ATTEMPT_LOCK = "attempt.lock"


@contextmanager
def run_folder_lock(run_dir: Path) -> Iterator[None]:
    """Holds the run folder. The system lets go of it when this process ends, however it ends.

    A file system that cannot lock a folder (some network ones) is taken as it is.

    Raises:
        ConfigError: another process holds it, or the ranks of a job do.
    """
    folder = os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(OSError):
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(f"run_dir={run_dir}: another job is running in it. Wait for its end, or choose another.") from None
        if (run_dir / ATTEMPT_LOCK).exists():
            ranks = Lock(run_dir / ATTEMPT_LOCK)
            is_free = ranks.try_for(0.0)
            ranks.release()
            if not is_free:
                raise ConfigError(f"run_dir={run_dir}: the ranks of another job run in it. Wait for their end, or choose another.")
        yield
    finally:
        os.close(folder)


class Lock:
    """A file or folder that a process holds; the system lets go of it when the process ends.

    Rank 0 holds the run folder's ``attempt.lock`` as long as it lives: the command that starts the ranks may hold the folder, or be gone.
    """

    def __init__(self, path: Path) -> None:
        """Args:
        path: A folder, or a file, which is made if it is missing.
        """
        self._file = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR | os.O_CREAT, 0o600)

    def try_for(self, seconds: float) -> bool:
        """Tries to get the lock; a file system that has none gives it to everybody."""
        until = time.monotonic() + seconds
        while True:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > until:
                    return False
                time.sleep(0.1)
            except OSError:
                return True
            else:
                return True

    def release(self) -> None:
        """Lets go."""
        os.close(self._file)
