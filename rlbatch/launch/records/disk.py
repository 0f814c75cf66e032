"""Why nothing can be written into a folder, in words. Error paths must not need what they report the lack of."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rlbatch.api import ConfigError

FULL = (errno.ENOSPC, errno.EDQUOT)
PROBE_BYTES = 2**20
"""A disk with less room counts as full."""


def trouble(folder: Path) -> str:
    """Tries to write.

    Returns:
        E.g. ``the disk is full. Free space there``: what is wrong, and what to do; empty: nothing.
    """
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
def telling_trouble(run_dir: Path) -> Iterator[None]:
    """For what writes into a run folder that nothing runs in.

    Raises:
        ConfigError: instead of the system's error, where it is the folder's.
    """
    try:
        yield
    except OSError as error:
        place = Path(str(error.filename)) if error.filename else None
        found = trouble(run_dir)
        if not found and place and place.is_relative_to(run_dir):
            found = f"{place.relative_to(run_dir)} cannot be written ({error.strerror}). Mend that"
        if not found:
            raise
        raise ConfigError(f"run_dir={run_dir}: {found}, or choose another folder.") from error
