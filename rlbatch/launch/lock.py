"""One job a run folder: two would delete each other's checkpoints and first errors."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rlbatch.api import ConfigError


@contextmanager
def run_folder_lock(run_dir: Path) -> Iterator[None]:
    """Holds the run folder. The system lets go of it when this process ends, however it ends.

    A file system that cannot lock a folder (some network ones) is taken as it is.

    Raises:
        ConfigError: another process holds it.
    """
    folder = os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(OSError):
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(f"run_dir={run_dir}: another job is running in it. Wait for its end, or choose another.") from None
        yield
    finally:
        os.close(folder)
