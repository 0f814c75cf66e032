"""Errors of the system where an engine's process is started or looked at, in words: what is full, and where."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlbatch.api import RolloutError

FULL = (errno.ENOSPC, errno.EDQUOT)
GIB = 2**30


@contextmanager
def told_in_words(what: str, folder: Path) -> Iterator[None]:
    """Whatever the system refuses in here is an error of the rollout.

    Args:
        what: That is being done.
        folder: Where, unless the system names a file.

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
