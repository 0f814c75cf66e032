"""Bytes of a file at a place, also on systems that cannot read around their cache of pages."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from rlbatch.checkpoint import reading
from rlbatch.checkpoint.reading import read_into

CONTENT = bytes(range(256)) * 40


@pytest.mark.parametrize("once", [False, True])
@pytest.mark.parametrize("refusal", [None, errno.EOPNOTSUPP, errno.EINVAL])
def test_bytes_at_a_place(once: bool, refusal: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Short reads go on; flags that the system does not know are left out; the end of the file is an error."""
    (tmp_path / "file").write_bytes(CONTENT)
    preadv = os.preadv

    def some(descriptor: int, buffers: list[memoryview], offset: int, flags: int = 0) -> int:
        if flags and refusal:
            raise OSError(refusal, os.strerror(refusal))
        return preadv(descriptor, [buffers[0][:1000]], offset)

    monkeypatch.setattr(reading.os, "preadv", some)
    with (tmp_path / "file").open("rb") as file:
        target = bytearray(5000)
        read_into(file.fileno(), memoryview(target), 123, once=once)
        assert target == CONTENT[123:5123]
        with pytest.raises(EOFError, match=r"ends at byte 10240, 123 more were expected"):
            read_into(file.fileno(), memoryview(target), len(CONTENT) + 123 - 5000, once=once)


def test_other_errors_are_told(tmp_path: Path) -> None:
    """A file that cannot be read is not read as if it could."""
    with (tmp_path / "file").open("wb") as file, pytest.raises(OSError, match="Bad file descriptor"):
        read_into(file.fileno(), memoryview(bytearray(1)), 0, once=True)
