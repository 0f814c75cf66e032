"""Says whose a run folder is: by the id in ``run.json`` its run's, which deletes nothing but its own; by locks one job's at a time."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import rlbatch
from rlbatch.api import ConfigError, LaunchError, RlbatchError
from rlbatch.config.bounded_files import read_own
from rlbatch.config.compose import CONFIG_FILE, load_config
from rlbatch.launch.records.attempt import read_attempt

RUN_ID_FILE = "run.json"


def read_run_id(run_dir: Path) -> str:
    """The id of the run whose folder it is; empty: it has none."""
    with suppress(OSError, ValueError, KeyError):
        return str(read_own(run_dir / RUN_ID_FILE)["run"])
    return ""


def ensure_run_id(run_dir: Path) -> str:
    """Reads the id of a folder that exists, as ``read_run_id``; one without an id gets one, or OSError is raised."""
    run = read_run_id(run_dir)
    if not run:
        run = secrets.token_hex(16)
        draft = run_dir / f".{RUN_ID_FILE}.{run[:8]}"
        draft.write_text(json.dumps({"run": run, "rlbatch": rlbatch.__version__}) + "\n", encoding="utf-8")
        os.replace(draft, run_dir / RUN_ID_FILE)
    return run


def is_run_folder(folder: Path) -> bool:
    """Whether a folder has a run in it, also one that began before run folders were marked."""
    if read_run_id(folder):
        return True
    with suppress(OSError, LaunchError):
        if read_attempt(folder):
            return True
    try:
        return bool(load_config(folder / CONFIG_FILE).run_dir)
    except RlbatchError:
        return False


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
        self._file = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR | os.O_CREAT, 0o600)

    def try_for(self, seconds: float) -> bool:
        """Tries to get the lock; on a file system without locks everybody gets it."""
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
        """Lets go of the lock."""
        os.close(self._file)
