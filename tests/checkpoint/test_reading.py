"""Bytes of a file at a place, also on systems that cannot read around their cache of pages."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from rlbatch.api import DataError
from rlbatch.checkpoint import reading
from rlbatch.checkpoint.reading import check_finite, count_not_finite, read_into

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


@pytest.mark.parametrize("refusal", [None, "open", "read"])
@pytest.mark.parametrize("offset", [0, 123, 2**20 - 1])
def test_large_parts_around_the_page_cache(refusal: str | None, offset: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever their place, also where a file system cannot do it; the end of the file is an error as ever."""
    content = np.random.default_rng(0).bytes(reading.CHUNK_BYTES + 2**21 + 77)
    (tmp_path / "file").write_bytes(content)
    opened, preadv, direct = os.open, os.preadv, set()

    def some_open(path: str, flags: int, *mode: int) -> int:
        if refusal == "open":
            raise OSError(errno.EINVAL, "no O_DIRECT here")
        direct.add(found := opened(path, flags, *mode))
        return found

    def some_read(descriptor: int, buffers: list[memoryview], offset: int, flags: int = 0) -> int:
        if refusal == "read" and descriptor in direct:
            raise OSError(errno.EINVAL, "no O_DIRECT here")
        return preadv(descriptor, buffers, offset, flags)

    monkeypatch.setattr(reading.os, "open", some_open)
    monkeypatch.setattr(reading.os, "preadv", some_read)
    with (tmp_path / "file").open("rb") as file:
        target = bytearray(len(content) - offset - 33)
        read_into(file.fileno(), memoryview(target), offset, once=True)
        assert target == content[offset:-33]
        with pytest.raises(EOFError, match=f"ends at byte {len(content)}, 5 more were expected"):
            read_into(file.fileno(), memoryview(bytearray(2**21)), len(content) - 2**21 + 5, once=True)


def test_a_threads_memory_is_made_once(tmp_path: Path) -> None:
    """What is passing is there until the next, in the same memory."""
    (tmp_path / "file").write_bytes(CONTENT)
    with (tmp_path / "file").open("rb") as file:
        first = reading.passing(file.fileno(), 1000, 5)
        assert first.tobytes() == CONTENT[5:1005]
        assert np.shares_memory(reading.passing(file.fileno(), 500, 7), first)
        assert first[2:502].tobytes() == CONTENT[7:507]


def cached_pages(path: Path) -> int:
    """Of a file, in the page cache."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, mmap.MAP_SHARED, mmap.PROT_READ) as pages:
        count = len(pages) // mmap.PAGESIZE
        found, place = (ctypes.c_ubyte * count)(), np.frombuffer(pages, dtype=np.uint8)
        assert ctypes.CDLL(None, use_errno=True).mincore(ctypes.c_void_p(place.ctypes.data), ctypes.c_size_t(len(pages)), found) == 0
        del place
        return sum(each & 1 for each in found)


@pytest.mark.parametrize("refusal", [None, errno.EOPNOTSUPP])
def test_what_is_read_once_is_not_kept(refusal: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither where the kernel knows the flag, nor where the pages have to be given back; what is read again and again stays."""
    preadv = os.preadv

    def some(descriptor: int, buffers: list[memoryview], offset: int, flags: int = 0) -> int:
        if flags and refusal:
            raise OSError(refusal, os.strerror(refusal))
        return preadv(descriptor, buffers, offset, flags)

    monkeypatch.setattr(reading.os, "preadv", some)
    path, size = tmp_path / "file", 64 * mmap.PAGESIZE
    with path.open("wb") as file:
        file.write(bytes(size))
        file.flush()
        os.fsync(file.fileno())
    with path.open("rb") as file:
        for once, kept in ((True, 0), (False, 64), (True, 0)):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            read_into(file.fileno(), memoryview(bytearray(size)), 0, once=once)
            assert cached_pages(path) == kept


def test_other_errors_are_told(tmp_path: Path) -> None:
    """A file that cannot be read is not read as if it could."""
    with (tmp_path / "file").open("wb") as file, pytest.raises(OSError, match="Bad file descriptor"):
        read_into(file.fileno(), memoryview(bytearray(1)), 0, once=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_every_value_of_a_type(dtype: torch.dtype) -> None:
    """As torch sees it: all bit patterns of the small types, the extremes of the others."""
    if dtype.itemsize <= 2:
        integer = torch.int8 if dtype.itemsize == 1 else torch.int16
        values = torch.arange(torch.iinfo(integer).min, torch.iinfo(integer).max + 1).to(integer).view(dtype)
    else:
        limits = torch.finfo(dtype)
        values = torch.tensor([0.0, -0.0, limits.max, limits.min, limits.smallest_normal, torch.inf, -torch.inf, torch.nan], dtype=dtype)
    wanted = int((~values.float().isfinite()).sum()) if dtype != torch.float64 else 3
    assert count_not_finite(values) == wanted > 0
    assert count_not_finite(values[:0]) == 0
    assert count_not_finite(torch.zeros(3, 3, dtype=dtype)) == 0


def test_integers_are_finite() -> None:
    """Whatever their bits."""
    assert count_not_finite(torch.tensor([-1, 0x7F800000])) == 0


def test_refused() -> None:
    """With the place and the number."""
    check_finite(torch.ones(4), "file: weight")
    with pytest.raises(DataError, match=r"^file: weight: 2 of 4 values are infinite or NaN\. Download the file again; "):
        check_finite(torch.tensor([[1.0, torch.nan], [-torch.inf, 0.0]]), "file: weight")
