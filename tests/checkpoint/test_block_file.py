"""A file that is written around the page cache has the bytes that were given to it, whatever their parts are, and on any file system."""

from __future__ import annotations

import errno
import os
import random
import zlib
from pathlib import Path

import pytest

from rlbatch.checkpoint import block_file
from rlbatch.checkpoint.block_file import BLOCK_BYTES, BlockFile, Part

CONTENT = random.Random(0).randbytes(2 * BLOCK_BYTES + 12_345)


def cut(lengths: list[int]) -> list[Part]:
    """The content in parts."""
    parts: list[Part] = []
    start = 0
    for length in [*lengths, len(CONTENT)]:
        part = memoryview(CONTENT)[start : start + length]
        parts.append(part)
        start += length
    return parts


def write(path: Path, parts: list[Part]) -> BlockFile:
    with BlockFile(path) as file:
        for part in parts:
            file.write(part)
        file.finish()
    return file


@pytest.mark.parametrize("lengths", [[], [1, 0, 4095, 4096], [BLOCK_BYTES], [BLOCK_BYTES - 1, 2, BLOCK_BYTES], [5, 2 * BLOCK_BYTES]])
def test_bytes_and_checksum(lengths: list[int], tmp_path: Path) -> None:
    """Length, content and CRC-32 are those of the parts."""
    file = write(tmp_path / "file", cut(lengths))
    assert (tmp_path / "file").read_bytes() == CONTENT
    assert (file.nbytes, file.crc32) == (len(CONTENT), zlib.crc32(CONTENT))


def test_nothing(tmp_path: Path) -> None:
    """A file may be empty."""
    assert write(tmp_path / "file", []).crc32 == 0
    assert (tmp_path / "file").read_bytes() == b""


def test_memory_is_used_again(tmp_path: Path) -> None:
    """Whoever gives a part may overwrite it afterwards."""
    memory = bytearray(BLOCK_BYTES + 1)
    with BlockFile(tmp_path / "file") as file:
        for value in range(4):
            memory[:] = bytes([value]) * len(memory)
            file.write(memoryview(memory))
        file.finish()
    wanted = b"".join(bytes([value]) * len(memory) for value in range(4))
    assert (tmp_path / "file").read_bytes() == wanted
    assert file.crc32 == zlib.crc32(wanted)


@pytest.mark.parametrize("refuses", ["open", "write"])
def test_file_systems_without_direct_writes(refuses: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where files cannot be opened for writing around the page cache, or can and then are not written so, it is used."""
    opening, writing, refused = os.open, os.write, []

    def open_(path: Path, flags: int, mode: int) -> int:
        if flags & os.O_DIRECT and refuses == "open":
            refused.append(path)
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return opening(path, flags & ~os.O_DIRECT, mode)

    def write_(descriptor: int, data: memoryview) -> int:
        if refuses == "write" and not refused:
            refused.append(descriptor)
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return writing(descriptor, data[:1_000_001])

    monkeypatch.setattr(block_file.os, "open", open_)
    monkeypatch.setattr(block_file.os, "write", write_)
    file = write(tmp_path / "file", cut([7, BLOCK_BYTES]))
    monkeypatch.undo()
    assert len(refused) == 1
    assert (tmp_path / "file").read_bytes() == CONTENT
    assert file.crc32 == zlib.crc32(CONTENT)


@pytest.mark.parametrize("after", [0, 2])
def test_a_full_disk_is_told(after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the second thread meets reaches the first one, at the latest when the file is finished."""
    writing, calls = os.write, []

    def full(descriptor: int, data: memoryview) -> int:
        calls.append(len(data))
        if len(calls) > after:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return writing(descriptor, data)

    monkeypatch.setattr(block_file.os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path / "file", cut([]))
