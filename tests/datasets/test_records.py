"""Every kind of data file gives the same rows; what is broken, or no such file, is named."""

from __future__ import annotations

import datetime
import decimal
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from rlbatch.api import DataError
from rlbatch.datasets.records import read_records

ROWS = [{"prompt": [{"role": "user", "content": f"{number} é"}], "label": {"n": number}} for number in range(3000)]
TEXT = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS).encode()
HALF = len(TEXT) // 2


def zstd(content: bytes) -> bytes:
    return bytes(pyarrow.compress(content, codec="zstd", asbytes=True))


def parquet(path: Path, rows: list[dict[str, Any]] = ROWS) -> Path:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=700)
    return path


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("p.jsonl", TEXT),
        ("p.jsonl.gz", gzip.compress(TEXT, mtime=0)),
        ("two.jsonl.gz", gzip.compress(TEXT[:HALF], mtime=0) + gzip.compress(TEXT[HALF:], mtime=0)),
        ("p.jsonl.zst", zstd(TEXT)),
        ("two.jsonl.zst", zstd(TEXT[:HALF]) + zstd(TEXT[HALF:])),
        ("by_pzstd.jsonl.zst", b"\x50\x2a\x4d\x18\x04\0\0\0size" + zstd(TEXT)),
        ("by_content", gzip.compress(TEXT, mtime=0)),
    ],
)
def test_compressed_files(name: str, content: bytes, tmp_path: Path) -> None:
    """Also in several parts, as `cat` and parallel packers make them."""
    (tmp_path / name).write_bytes(content)
    assert list(read_records(tmp_path / name)) == list(enumerate(ROWS, start=1))


def test_parquet(tmp_path: Path) -> None:
    """Rows of all row groups, counted from 1, as jsonl would have them; of named columns only those."""
    assert list(read_records(parquet(tmp_path / "p.parquet"))) == list(enumerate(ROWS, start=1))
    assert list(read_records(tmp_path / "p.parquet", ["label", "absent"]))[-1] == (3000, {"label": {"n": 2999}})
    row = {"a": datetime.date(2026, 1, 2), "b": decimal.Decimal("3.50"), "c": float("nan"), "d": b"\xff", "e": [b"x"], "f": [1.5]}
    assert list(read_records(parquet(tmp_path / "q.parquet", [row]))) == [(1, {"a": "2026-01-02", "b": "3.50", "c": None, "f": [1.5]})]


def cut(path: Path) -> Path:
    path.write_bytes(path.read_bytes()[:-2000])
    return path


def overwritten(path: Path) -> Path:
    content = bytearray(path.read_bytes())
    content[100:4000] = bytes(3900)
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("p.jsonl", b"", r"p\.jsonl:1: no prompts, the file is empty"),
        ("p.parquet", b"", r"p\.parquet:1: no prompts, the file is empty"),
        ("p.jsonl", b"PAR1\x15", r"p\.jsonl: must be jsonl, is a Parquet file\. Rename it to p\.parquet\."),
        ("p.jsonl", b"\x1f\x8b\x08", r"p\.jsonl: must be jsonl, is compressed \(gzip\)\. Rename it to p\.jsonl\.gz\."),
        ("p.jsonl", b"\x28\xb5\x2f\xfd", r"p\.jsonl: must be jsonl, is compressed \(zstd\)\. Rename it to p\.jsonl\.zst\."),
        ("p.jsonl", b"\x04\x22\x4d\x18", r"p\.jsonl: must be jsonl, is compressed \(lz4\)"),
        ("p.jsonl", b"version https://git-lfs.github.com/spec/v1\noid", "is a Git LFS pointer, .* Run `git lfs pull`"),
        ("p.parquet", b"version https://git-lfs.github.com/spec/v1\noid", "must be parquet, is a Git LFS pointer, .* Run `git lfs pull`"),
        ("p.parquet", b'{"prompt": "a"}\n', r"must be parquet, is text .* rename it to p\.jsonl if it is jsonl"),
        ("p.jsonl.gz", TEXT, r"must be jsonl\.gz, is text .* rename it to p\.jsonl if"),
        ("p.jsonl", b"<!DOCTYPE html><html>", "is a web page. Download the file itself"),
        ("p.parquet", b"PAR1" + bytes(100), r"p\.parquet: broken parquet \(.*\)\. Download it again"),
        ("p.jsonl.gz", gzip.compress(TEXT, mtime=0)[:-500], r"p\.jsonl\.gz:2\d\d\d: the compressed file ends early or is damaged"),
        ("p.jsonl.zst", zstd(TEXT)[:-500], r"p\.jsonl\.zst:\d+: the compressed file ends early or is damaged"),
        ("p.jsonl.gz", b"\x1f\x8bjunk", r"p\.jsonl\.gz:1: the compressed file ends early or is damaged"),
        ("p.jsonl.gz", gzip.compress(b"PAR1\x15", mtime=0), "must be compressed jsonl, holds what is a Parquet file"),
        ("p.tar", bytes(257) + b"ustar\x0000", r"must be jsonl or parquet, is a tar archive\. Unpack it with tar -xf\."),
        ("p.jsonl.gz", gzip.compress(bytes(257) + b"ustar  ", mtime=0), "must be compressed jsonl, is a tar archive"),
        ("p.arrow", b"\xff\xff\xff\xff\x98\x01", r"is an Arrow stream\. Write it as parquet; a folder of datasets\.save_to_disk: "),
        # A frame whose window is 2 GiB: what zstd --long=31 writes.
        (
            "p.jsonl.zst",
            b"\x28\xb5\x2f\xfd\x04\xa8" + bytes(60),
            r"p\.jsonl\.zst: cannot be unpacked \(.* Unpack it with `zstd -d --long=31`",
        ),
    ],
)
def test_files_that_are_no_such_files(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    """Each is one message: what the file is, and what to do."""
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        list(read_records(tmp_path / name))


@pytest.mark.parametrize("damage", [cut, overwritten])
def test_broken_parquet(damage: Callable[[Path], Path], tmp_path: Path) -> None:
    """Its end or its middle."""
    with pytest.raises(DataError, match=r"p\.parquet: broken parquet \("):
        list(read_records(damage(parquet(tmp_path / "p.parquet"))))
