"""A large file at the disk's speed: written in large blocks around the page cache, each while the next one is being filled."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import zlib
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

BLOCK_BYTES = 8 * 2**20
"""Size of a write."""
BLOCKS = 3
"""Blocks in memory: one is filled, one is written, one waits."""
ALIGNMENT = 4096
"""What memory, lengths and places in a file must be multiples of, for writes around the page cache."""

Part = bytes | memoryview
"""Some of a file's bytes."""


class BlockFile:
    """A new file that is written from its first byte to its last.

    A second thread writes, with ``O_DIRECT`` where the file system can: to find and fill pages of the page cache takes more processor time
    than everything else about a copy, and they throw out what others need.

    Args:
        path: The file to make.
        has_crc: Whether its CRC-32 is computed, which takes longer than a fast disk.

    Attributes:
        nbytes: Written so far.
        crc32: CRC-32 of the whole file, once it is finished; 0 without.

    Raises:
        OSError: it cannot be written; of every method.
    """

    def __init__(self, path: Path, *, has_crc: bool = True) -> None:
        self.nbytes = self.crc32 = 0
        self._has_crc = has_crc
        self._descriptor, self._is_direct = _create(path)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rlbatch-write")
        self._blocks = [np.frombuffer(mmap.mmap(-1, BLOCK_BYTES), dtype=np.uint8) for _ in range(BLOCKS)]
        self._written: list[Future[None] | None] = [None] * BLOCKS
        self._current = self._filled = 0

    def __enter__(self) -> BlockFile:
        """Returns itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Closes the file, finished or not."""
        self._thread.shutdown(cancel_futures=True)
        os.close(self._descriptor)

    def write(self, part: Part) -> None:
        """Appends bytes; their memory may be used for others afterwards."""
        data = np.frombuffer(part, dtype=np.uint8)
        rest = data
        while len(rest):
            room = self._block[self._filled :][: len(rest)]
            room[:], rest = rest[: len(room)], rest[len(room) :]
            if self._has_crc:
                self._thread.submit(self._check, room)
            self._filled += len(room)
            if self._filled == BLOCK_BYTES:
                self._hand_over(BLOCK_BYTES)
        self.nbytes += len(data)

    def finish(self) -> None:
        """Returns when every byte is on the disk."""
        padding = -self._filled % ALIGNMENT if self._is_direct else 0
        self._block[self._filled : self._filled + padding] = 0
        self._hand_over(self._filled + padding)
        for written in filter(None, self._written):
            written.result()
        os.ftruncate(self._descriptor, self.nbytes)
        os.fsync(self._descriptor)
        os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    @property
    def _block(self) -> Any:
        return self._blocks[self._current]

    def _hand_over(self, length: int) -> None:
        """Lets the current block be written, and goes on in the next one as soon as that is free."""
        self._written[self._current] = self._thread.submit(self._write, memoryview(self._block)[:length])
        self._current, self._filled = (self._current + 1) % BLOCKS, 0
        if (before := self._written[self._current]) is not None:
            before.result()

    # In the second thread, one after the other:

    def _check(self, data: Any) -> None:
        self.crc32 = zlib.crc32(data, self.crc32)

    def _write(self, block: memoryview) -> None:
        while block:
            try:
                block = block[os.write(self._descriptor, block) :]
            except OSError as error:
                if error.errno != errno.EINVAL or not self._is_direct:
                    raise
                self._is_direct = False  # opened so, and not written so; or an odd number of bytes was written
                fcntl.fcntl(self._descriptor, fcntl.F_SETFL, 0)


def _create(path: Path) -> tuple[int, bool]:
    """A new file's descriptor, and whether it goes around the page cache."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    try:
        return os.open(path, flags | os.O_DIRECT, 0o666), True
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(path, flags, 0o666), False
