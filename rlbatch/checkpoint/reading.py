"""Reading a file's bytes at a place, into memory that is there."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass

_DONTCACHE = 0x80
"""``RWF_DONTCACHE`` of Linux 6.14: pages that were not in the page cache before are not there afterwards."""


@dataclass(frozen=True)
class Reading:
    """How weights are read.

    Attributes:
        once: They will not be read again: where the system can, they are not kept in the page cache, which costs processor time and
            throws out what others need.
        finite: Values that are infinite or NaN are refused.
    """

    once: bool = False
    finite: bool = False


def read_into(descriptor: int, target: memoryview, offset: int, *, once: bool = False) -> None:
    """Fills ``target`` from a file's bytes at ``offset``.

    Args:
        descriptor: Of the file.
        target: Where to.
        offset: From where.
        once: As of ``Reading``.

    Raises:
        OSError: it cannot be read.
        EOFError: the file ends before.
    """
    done = 0
    while done < len(target):
        count = _read(descriptor, target[done:], offset + done, once)
        if not count:
            raise EOFError(f"ends at byte {offset + done}, {len(target) - done} more were expected")
        done += count


def _read(descriptor: int, target: memoryview, offset: int, once: bool) -> int:
    if once:
        try:
            return os.preadv(descriptor, [target], offset, _DONTCACHE)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):  # of a kernel or a file system that does not know it
                raise
    return os.preadv(descriptor, [target], offset)
