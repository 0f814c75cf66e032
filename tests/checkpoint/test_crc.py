"""Checksums of parts give the checksum of the whole."""

from __future__ import annotations

import random
import zlib

import pytest

from rlbatch.checkpoint.crc import Checked, joined


@pytest.mark.parametrize("length", [0, 1, 2, 3, 255, 256, 65_537, 1_000_003])
def test_two_runs(length: int) -> None:
    """The CRC-32 of two runs of bytes comes from theirs, whatever their lengths."""
    first, second = random.Random(length).randbytes(1000), random.Random(length + 1).randbytes(length)
    assert joined(zlib.crc32(first), zlib.crc32(second), length) == zlib.crc32(first + second)
    assert joined(zlib.crc32(b""), zlib.crc32(second), length) == zlib.crc32(second)


def test_many_gigabytes() -> None:
    """Lengths beyond 32 bits: 2^33 zero bytes, doubled from one."""
    checksum, length = zlib.crc32(b"\0"), 1
    while length < 2**33:
        checksum, length = joined(checksum, checksum, length), 2 * length
    piece, wanted = bytes(2**20), 0
    small = zlib.crc32(piece)
    for _ in range(2**13):
        wanted = joined(wanted, small, len(piece))
    assert checksum == wanted


def test_checked() -> None:
    """Bytes carry their checksum."""
    assert Checked.of(memoryview(b"123456789")).crc32 == 0xCBF43926
