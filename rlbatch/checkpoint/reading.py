"""Reads a file's bytes at a place, into memory that is there."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from rlbatch.api import DataError

_DONTCACHE = 0x80
"""``RWF_DONTCACHE`` of Linux 6.14: pages that were not in the page cache before are not there afterwards."""


@dataclass(frozen=True)
class Reading:
    """How weights are read.

    Attributes:
        once: They will not be read again: they are not kept in the page cache, which counts as this job's memory, costs processor time and
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
    count = os.preadv(descriptor, [target], offset)
    if once:
        with suppress(OSError):  # a pipe
            os.posix_fadvise(descriptor, offset, count, os.POSIX_FADV_DONTNEED)
    return count


_BITS = {
    torch.float64: (torch.int64, 0x7FF0000000000000),
    torch.float32: (torch.int32, 0x7F800000),
    torch.bfloat16: (torch.int16, 0x7F80),
    torch.float16: (torch.int16, 0x7C00),
    torch.float8_e4m3fn: (torch.int8, 0x7F),
    torch.float8_e5m2: (torch.int8, 0x7C),
}
"""Integers of a type's size, and the bits of its infinity (or of its first NaN): without their sign, NaN are the larger ones."""

AT_ONCE = 2**22
"""Values that are looked at together: their copy takes memory."""


def count_not_finite(tensor: Tensor) -> int:
    """How many values are infinite or NaN; 0 for integers.

    Args:
        tensor: Contiguous.
    """
    if tensor.dtype not in _BITS:
        return 0
    integer, infinity = _BITS[tensor.dtype]
    count = 0
    for part in tensor.view(-1).view(integer).split(AT_ONCE) if tensor.numel() else ():
        magnitude = part & torch.iinfo(integer).max
        if magnitude.amax().item() >= infinity:
            count += int((magnitude >= infinity).sum())
    return count


def check_finite(tensor: Tensor, origin: str) -> None:
    """Refuses values that no weight can have.

    Args:
        tensor: Contiguous.
        origin: What it is: file and tensor.

    Raises:
        DataError: with their number.
    """
    if count := count_not_finite(tensor):
        raise DataError(
            f"{origin}: {count} of {tensor.numel()} values are infinite or NaN. Download the file again; `rlbatch.convert` takes them with "
            "finite=false."
        )
