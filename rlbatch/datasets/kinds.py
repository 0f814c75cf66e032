"""Says what a data file is: by its name and by its first bytes, which must agree."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from rlbatch.api import DataError
from rlbatch.config.bounded_files import open_regular

Kind = Literal["jsonl", "jsonl.gz", "jsonl.zst", "parquet"]

FIX = "Point data.train and data.eval to jsonl or parquet files."
START_BYTES = 512
_BY_MAGIC: Mapping[bytes, tuple[Kind, str]] = {
    b"PAR1": ("parquet", "a Parquet file"),
    b"\x1f\x8b": ("jsonl.gz", "compressed (gzip)"),
    b"\x28\xb5\x2f\xfd": ("jsonl.zst", "compressed (zstd)"),
    b"\x50\x2a\x4d\x18": ("jsonl.zst", "compressed (zstd)"),  # as pzstd begins
}
_OTHERS: Mapping[bytes, tuple[str, str]] = {
    b"\xff\xff\xff\xff": (
        "an Arrow stream",
        "Write it as parquet; a folder of datasets.save_to_disk: `datasets.load_from_disk(folder).to_parquet(path)`.",
    ),
    b"ARROW1": ("an Arrow file", "Write it as parquet, e.g. with `pyarrow.feather.read_table` and `pyarrow.parquet.write_table`."),
    b"PARE": ("an encrypted Parquet file", "Decrypt it."),
    b"Obj\x01": ("an Avro file", "Write it as jsonl."),
    b"\x04\x22\x4d\x18": ("compressed (lz4)", "Unpack it with unlz4."),
    b"\xfd7zXZ": ("compressed (xz)", "Unpack it with unxz."),
    b"BZh": ("compressed (bzip2)", "Unpack it with bunzip2."),
    b"PK\x03\x04": ("a zip archive", "Unpack it with unzip."),
    b"version https://git-lfs": ("a Git LFS pointer, the file itself was not downloaded", "Run `git lfs pull` in its repository."),
    b"<!doctype html": ("a web page", "Download the file itself."),
    b"<html": ("a web page", "Download the file itself."),
}
_TAR, _TAR_AT = b"ustar", 257
_TEXT = "text without a sign of that"


def kind_of(path: Path) -> Kind:
    """What a file is; raises DataError if it cannot be read, is no data file, or another than its name says."""
    with open_regular(path, FIX) as file:
        start = file.read(START_BYTES)
    if not start:
        raise empty(path)
    expected = _by_name(path)
    _refuse_others(path, expected or "jsonl or parquet", start)
    kind, words = next(((kind, words) for magic, (kind, words) in _BY_MAGIC.items() if start.startswith(magic)), ("jsonl", _TEXT))
    if expected not in (None, kind):
        name = path.name.removesuffix(f".{expected}")
        fix = f"Download it again, or rename it to {name}.jsonl if it is jsonl." if kind == "jsonl" else f"Rename it to {name}.{kind}."
        raise DataError(f"{path}: must be {expected}, is {words}. {fix}")
    return kind


def check_unpacked(path: Path, start: bytes) -> None:
    """Refuses, with DataError, a compressed file that holds something else than jsonl."""
    _refuse_others(path, "compressed jsonl", start)
    for magic, (_, words) in _BY_MAGIC.items():
        if start.startswith(magic):
            raise DataError(f"{path}: must be compressed jsonl, holds what is {words}. Unpack it once.")


def empty(path: Path) -> DataError:
    """The error for a file without rows."""
    return DataError(f"{path}:1: no prompts, the file is empty. Write one JSON object a line.")


def _by_name(path: Path) -> Kind | None:
    kinds: tuple[Kind, ...] = ("jsonl.gz", "jsonl.zst", "jsonl", "parquet")
    return next((kind for kind in kinds if path.name.endswith(f".{kind}")), None)


def _refuse_others(path: Path, expected: str, start: bytes) -> None:
    if start.startswith(_TAR, _TAR_AT):
        raise DataError(f"{path}: must be {expected}, is a tar archive. Unpack it with tar -xf.")
    for magic, (what, fix) in _OTHERS.items():
        if start.lower().startswith(magic.lower()):
            raise DataError(f"{path}: must be {expected}, is {what}. {fix}")
