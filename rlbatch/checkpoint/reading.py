"""Reads a range of a file into a buffer that exists already."""

from __future__ import annotations

import errno
import math
import mmap
import os
import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlbatch.api import DataError
from rlbatch.checkpoint.block_file import ALIGNMENT
from rlbatch.weights.codec import CHUNK_BYTES

_DONTCACHE = 0x80
"""``RWF_DONTCACHE`` of Linux 6.14: pages that were not in the page cache before are not there afterwards."""
DIRECT_BYTES = 2**20
"""Bytes from which on a read goes around the page cache; smaller ones go through it, as it reads ahead."""

_of_thread = threading.local()


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
        descriptor: The file's descriptor.
        target: Where to.
        offset: First byte to read.
        once: See ``Reading``.

    Raises:
        OSError: it cannot be read.
        EOFError: the file ends before.
    """
    data = np.frombuffer(target, dtype=np.uint8)
    if not once or len(data) < DIRECT_BYTES:
        _read_rest(descriptor, data, offset, once)
        return
    for start in range(0, len(data), CHUNK_BYTES):
        part = data[start : start + CHUNK_BYTES]
        part[:] = passing(descriptor, len(part), offset + start, once=once)


def passing(descriptor: int, nbytes: int, offset: int, *, once: bool = False) -> Any:
    """A file's bytes at ``offset``, as ``read_into``; in memory of this thread, a numpy array, which the next call fills again.

    New pages cost as much time as those of the page cache, and the C library keeps some of what a thread gives back.

    Args:
        descriptor: The file's descriptor.
        nbytes: Bytes to read, at most ``CHUNK_BYTES``.
        offset: First byte to read.
        once: See ``Reading``.
    """
    if not hasattr(_of_thread, "block"):
        _of_thread.block = np.frombuffer(mmap.mmap(-1, CHUNK_BYTES + ALIGNMENT), dtype=np.uint8)
    before = offset % ALIGNMENT
    part = _of_thread.block[before:][:nbytes]
    around = _of_thread.block[: before + nbytes + -(before + nbytes) % ALIGNMENT]
    done = max(0, min(_read_around(descriptor, around, offset - before) - before, nbytes)) if once and nbytes >= DIRECT_BYTES else 0
    _read_rest(descriptor, part[done:], offset + done, once)
    return part


def _read_around(descriptor: int, target: Any, offset: int) -> int:
    """Reads around the page cache, whose pages cost more processor time than all else; returns the bytes read: 0 where it cannot."""
    try:
        direct = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    except OSError:
        return 0
    try:
        return os.preadv(direct, [target], offset)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):  # opened so, and not read so
            raise
        return 0
    finally:
        os.close(direct)


def _read_rest(descriptor: int, target: Any, offset: int, once: bool) -> None:
    done = 0
    while done < len(target):
        count = _read(descriptor, target[done:], offset + done, once)
        if not count:
            raise EOFError(f"ends at byte {offset + done}, {len(target) - done} more were expected")
        done += count


def _read(descriptor: int, target: Any, offset: int, once: bool) -> int:
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


_BITS = {torch.float8_e4m3fn: 0x7F, torch.float8_e5m2: 0x7C}
"""Bits of infinity, or of the only NaN, in types without arithmetic; the bits of a NaN, without the sign, are never smaller."""

AT_ONCE = 2**17
"""Values of such a type that are looked at together: their copy stays in the processor's cache."""


def count_not_finite(tensor: Tensor) -> int:
    """How many values are infinite or NaN; 0 for integers.

    Args:
        tensor: Contiguous.
    """
    if not tensor.numel() or not tensor.is_floating_point():
        return 0
    if (infinity := _BITS.get(tensor.dtype)) is None:
        least, most = tensor.aminmax()  # NaN if one is among them
        return 0 if math.isfinite(least.item()) and math.isfinite(most.item()) else int((~tensor.isfinite()).sum())
    count = 0
    for part in tensor.view(-1).view(torch.int8).split(AT_ONCE):
        magnitude = part & torch.iinfo(torch.int8).max
        if magnitude.amax() >= infinity:
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
