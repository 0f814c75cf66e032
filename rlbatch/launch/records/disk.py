"""Says why nothing can be written into a folder. Error paths must not need what they report the lack of."""

from __future__ import annotations

import errno
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rlbatch.api import ConfigError, RolloutError

FULL = (errno.ENOSPC, errno.EDQUOT)
GIB = 2**30
PROBE_BYTES = 2**20
"""A disk with less room counts as full."""


def write_problem(folder: Path) -> str:
    """Tries to write; returns what is wrong, and what to do, e.g. ``the disk is full. Free space there``; empty: nothing."""
    probe = folder / f".probe-{socket.gethostname()}-{os.getpid()}"
    try:
        with probe.open("wb") as file:
            file.write(bytes(PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return _words(error)
    finally:
        with suppress(OSError):
            probe.unlink()
    return ""


def _words(error: OSError) -> str:
    if error.errno in FULL:
        return f"the {'quota' if error.errno == errno.EDQUOT else 'disk'} is full. Free space there"
    if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ESTALE):
        return "was moved or removed. Leave it where it is while something runs in it"
    return f"cannot be written ({error.strerror}). Mend that"


@contextmanager
def as_config_errors(run_dir: Path) -> Iterator[None]:
    """Turns errors of writing into a run folder that nothing runs in into refusals.

    Raises:
        ConfigError: instead of the system's error, where it is the folder's.
    """
    try:
        yield
    except OSError as error:
        place = Path(str(error.filename)) if error.filename else None
        found = write_problem(run_dir)
        if not found and place and place.is_relative_to(run_dir):
            found = f"{place.relative_to(run_dir)} cannot be written ({error.strerror}). Mend that"
        if not found:
            raise
        raise ConfigError(f"run_dir={run_dir}: {found}, or choose another folder.") from error


@contextmanager
def as_rollout_errors(what: str, folder: Path) -> Iterator[None]:
    """A context that turns errors of the system into RolloutError.

    Raises:
        RolloutError: naming the file, and where a disk is full, its free space.
    """
    try:
        yield
    except OSError as error:
        place = Path(str(error.filename)) if error.filename else folder
        if error.errno not in FULL:
            raise RolloutError(f"rollout: {what}: {place}: {error.strerror or error}. Mend that.") from error
        there = next(path for path in (place, *place.parents) if path.exists())
        raise RolloutError(
            f"rollout: {what}: the disk of {place} is full ({shutil.disk_usage(there).free / GIB:.2f} GiB free; it may "
            "lack room for another file, or have a quota). Free space there; TMPDIR and run_dir choose other disks."
        ) from error
