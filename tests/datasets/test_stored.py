"""Any row of a data file at once: the same rows and places as reading it from its beginning, made once."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from rlbatch.api import DataError
from rlbatch.datasets import stored
from rlbatch.datasets.records import read_records
from rlbatch.datasets.stored import StoredRows, store_files

ROWS = [{"prompt": "é" * (number % 7) + str(number), "label": number, "reward": ["a", 'b"', None][number % 3]} for number in range(2500)]
LINES = [json.dumps(row, ensure_ascii=False) for row in ROWS]
TEXT = ("\ufeff\n" + LINES[0] + "\r\n \t \n\u2028\n  " + "\n".join(LINES[1:])).encode()
"""Blank lines, of several kinds of blanks, and none at the end."""


def files(folder: Path) -> list[Path]:
    (folder / "p.jsonl").write_bytes(TEXT)
    (folder / "p.jsonl.gz").write_bytes(gzip.compress(TEXT))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), folder / "p.parquet", row_group_size=700)
    return [folder / "p.jsonl", folder / "p.jsonl.gz", folder / "p.parquet"]


@pytest.mark.parametrize("block", [64, 2**22])
def test_any_row(block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its line, wherever blocks of the file end."""
    monkeypatch.setattr(stored, "HASHED_BYTES", block)
    paths = files(tmp_path)
    kept = store_files(paths, tmp_path / "kept", "reward")
    for path, file in zip(paths, kept, strict=True):
        rows = StoredRows(file)
        assert len(rows) == len(ROWS)
        assert [rows.fields(number) for number in (2499, 0, 700, 1)] == [list(read_records(path))[number] for number in (2499, 0, 700, 1)]
        assert file.names == ["a", 'b"']
    assert kept[0].sha256 == kept[1].sha256 != kept[2].sha256
    assert kept[0].content == str(paths[0])


def test_made_once(tmp_path: Path) -> None:
    """An earlier attempt's are used as long as the file is the same, and made anew if it is not, or if they are gone."""
    path = files(tmp_path)[1]
    (first,) = store_files([path], tmp_path / "kept", "")
    made = os.stat(first.content).st_mtime_ns
    assert store_files([path], tmp_path / "kept", "") == [first]
    assert os.stat(first.content).st_mtime_ns == made
    os.unlink(first.index)
    assert store_files([path], tmp_path / "kept", "") == [first]
    path.write_bytes(gzip.compress(TEXT + b'\n{"prompt": "new"}'))
    (second,) = store_files([path], tmp_path / "kept", "")
    assert StoredRows(second).fields(2500)[1] == {"prompt": "new"}


def test_a_file_that_changes(tmp_path: Path) -> None:
    """Lines are not read from places where others were."""
    path = files(tmp_path)[0]
    rows = StoredRows(store_files([path], tmp_path / "kept", "")[0])
    rows.fields(0)
    with path.open("r+b") as file:
        file.write(b"{}\n")
    os.utime(path, ns=(1, 1))
    with pytest.raises(DataError, match=r"p\.jsonl: was changed while a run reads it"):
        rows.fields(0)


def test_what_cannot_be_stored(tmp_path: Path) -> None:
    """Is refused, and leaves no half of it."""
    (tmp_path / "blank.jsonl").write_text("\n \n")
    with pytest.raises(DataError, match=r"blank\.jsonl:1: no prompts"):
        store_files([tmp_path / "blank.jsonl"], tmp_path / "kept", "")
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(os.urandom(9999).hex().encode())[:-99])
    with pytest.raises(DataError, match=r"cut\.jsonl\.gz:1: the compressed file ends early"):
        store_files([tmp_path / "cut.jsonl.gz"], tmp_path / "kept", "")
    with (tmp_path / "long.jsonl").open("wb") as file:
        file.truncate(2**40)  # sparse
    with pytest.raises(DataError, match=r"long\.jsonl:1: must be at most 16 MiB long"):
        store_files([tmp_path / "long.jsonl"], tmp_path / "kept", "")
    assert list((tmp_path / "kept").iterdir()) == []
