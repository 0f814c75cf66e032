"""Reads a file's bytes at a place, into memory that is there."""

from __future__ import annotations

import errno
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
from rlbatch.checkpoint.block_file import ALIGNMENT, BLOCK_BYTES

_DONTCACHE = 0x80
"""``RWF_DONTCACHE`` of Linux 6.14: pages that were not in the page cache before are not there afterwards."""
DIRECT_BYTES = 2**20
"""Less is read through the page cache, which reads ahead."""

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
        descriptor: Of the file.
        target: Where to.
        offset: From where.
        once: As of ``Reading``.

    Raises:
        OSError: it cannot be read.
        EOFError: the file ends before.
    """
    done = _read_around(descriptor, target, offset) if once and len(target) >= DIRECT_BYTES else 0
    while done < len(target):
        count = _read(descriptor, target[done:], offset + done, once)
        if not count:
            raise EOFError(f"ends at byte {offset + done}, {len(target) - done} more were expected")
        done += count


def _read_around(descriptor: int, target: memoryview, offset: int) -> int:
    """Reads around the page cache, whose pages cost more processor time than all else; returns the bytes read: 0 where it cannot."""
    try:
        direct = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    except OSError:
        return 0
    done, block, data = 0, own_memory("block", BLOCK_BYTES + ALIGNMENT), np.frombuffer(target, dtype=np.uint8)
    try:
        while done < len(data):
            before = (offset + done) % ALIGNMENT
            wanted = before + len(data) - done
            part = memoryview(block)[: wanted + -wanted % ALIGNMENT]
            found = block[before : os.preadv(direct, [part], offset + done - before)][: len(data) - done]
            if not len(found):
                break
            data[done : done + len(found)] = found
            done += len(found)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):  # opened so, and not read so
            raise
    finally:
        os.close(direct)
    return done


def own_memory(use: str, nbytes: int) -> Any:
    """This thread's memory for something, at least so many bytes as a numpy array; the same at the next call, and gone with the thread.

    New pages cost as much time as those of the page cache, and the C library keeps some of what a thread gives back.
    """
    held = getattr(_of_thread, use, None)
    if held is None or len(held) < nbytes:
        held = np.frombuffer(mmap.mmap(-1, nbytes), dtype=np.uint8)
        setattr(_of_thread, use, held)
    return held


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

AT_ONCE = 2**16
"""Values that are looked at together: their copy stays in the processor's cache."""


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
