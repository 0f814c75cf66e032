"""Makes any row of a data file readable at once, however large the file: by an index of its lines, or a copy that has one.

A compressed file is unpacked once, and parquet, which is read in large pieces only, becomes an uncompressed Arrow file. Index and copies
are made by one process, in the run folder; all others map them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from rlbatch.api import DataError
from rlbatch.config.bounded_files import open_regular
from rlbatch.datasets.jsonl import BOM, FORM, LONGEST_ROW, DamagedError, blocks, damaged, decode_line, parse_line
from rlbatch.datasets.kinds import FIX, empty, kind_of
from rlbatch.datasets.parquet import batches, columns_of, opened, plain

HASHED_BYTES = 2**22
LONGEST_NAME = 200
"""Bytes of a reward's name, and of what is before it."""


@dataclass(frozen=True)
class StoredFile:
    """A data file with what its rows are read from.

    Attributes:
        path: The file.
        size, mtime_ns: Its state when it was read.
        wanted: Columns that were asked for.
        rows: How many it has.
        sha256: SHA-256 of its content; of a compressed file, unpacked.
        content: jsonl or an Arrow file: itself, or a copy.
        index: numpy file: of jsonl [rows, 3] int64, first byte, end and line of each; of an Arrow file [batches + 1] int64, rows before.
        names: Values that look like those of the column with rewards' names.
    """

    path: str
    size: int
    mtime_ns: int
    wanted: list[str] | None
    rows: int
    sha256: str
    content: str
    index: str
    names: list[str]


def store_files(paths: Sequence[Path], folder: Path, name_key: str, wanted: Sequence[str] | None = None) -> list[StoredFile]:
    """Makes the indexes and copies that rows are read from, unless an earlier attempt has left them; with the rewards' names in the column
    ``name_key`` (empty: none), and the ``wanted`` columns (None: all).

    Raises:
        DataError: a file cannot be read, or has no rows.
    """
    folder.mkdir(parents=True, exist_ok=True)

    def place(path: Path) -> Path:
        asked = json.dumps([str(path), name_key, wanted])
        return folder / hashlib.sha256(asked.encode()).hexdigest()[:16]

    return [_stored(path, place(path), name_key, wanted) for path in paths]


class StoredRows:
    """The rows of a stored file. Reading one touches no other."""

    def __init__(self, file: StoredFile) -> None:
        self.path = Path(file.path)
        self._file = file

    def __len__(self) -> int:
        return self._file.rows

    @property
    def digest(self) -> str:
        """SHA-256 of the file's content."""
        return self._file.sha256

    def fields(self, number: int) -> tuple[int, dict[str, Any]]:
        """Line (of parquet: number from 1) and fields of row ``number``, from 0; raises DataError if it is malformed."""
        if self._file.content.endswith(".arrow"):
            batch = int(np.searchsorted(self._index, number, side="right")) - 1
            row = self._arrow.get_batch(batch).slice(number - int(self._index[batch]), 1)
            return number + 1, plain(row.to_pylist()[0])
        if os.fstat(self._descriptor).st_mtime_ns != self._written:
            raise DataError(f"{self.path}: was changed while a run reads it, and its index is of before. Start the run again.")
        start, end, line = (int(value) for value in self._index[number])
        return line, parse_line(self.path, line, decode_line(self.path, line, os.pread(self._descriptor, end - start, start)))

    @cached_property
    def _index(self) -> Any:
        return np.load(self._file.index, mmap_mode="r")

    @cached_property
    def _arrow(self) -> Any:
        import pyarrow

        return pyarrow.ipc.open_file(pyarrow.memory_map(self._file.content))

    @cached_property
    def _written(self) -> int:
        """When the file was last written whose rows are read, ns: the data file, or the copy of it, which nobody else writes."""
        return self._file.mtime_ns if self._file.content == self._file.path else os.fstat(self._descriptor).st_mtime_ns

    @cached_property
    def _descriptor(self) -> int:
        return os.open(self._file.content, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        if "_descriptor" in vars(self):
            os.close(self._descriptor)


def _stored(path: Path, place: Path, name_key: str, wanted: Sequence[str] | None) -> StoredFile:
    kind, record = kind_of(path), place.with_suffix(".json")
    status = path.stat()
    columns = None if wanted is None or kind != "parquet" else list(wanted)
    known = _known(record)
    if known and (known.path, known.size, known.mtime_ns, known.wanted) == (str(path), status.st_size, status.st_mtime_ns, columns):
        return known
    content = path if kind == "jsonl" else place.with_suffix(".arrow" if kind == "parquet" else ".jsonl")
    if kind == "parquet":
        index, digest, names = _copy_parquet(path, content, name_key, columns)
        rows = int(index[-1])
    else:
        index, digest, names = _index_jsonl(path, content, kind, name_key)
        rows = len(index)
    if not rows:
        raise empty(path)
    with _replacing(place.with_suffix(".npy")) as draft, draft.open("wb") as file:
        np.save(file, index)
    stored = StoredFile(
        str(path), status.st_size, status.st_mtime_ns, columns, rows, digest, str(content), str(place.with_suffix(".npy")), sorted(names)
    )
    with _replacing(record) as draft:
        draft.write_text(json.dumps(dataclasses.asdict(stored)), encoding="utf-8")
    return stored


def _known(record: Path) -> StoredFile | None:
    """The stored file that an earlier attempt has left; None if there is none, or it is not whole."""
    try:
        known = StoredFile(**json.loads(record.read_text(encoding="utf-8")))
        return known if all(os.path.isfile(name) for name in (known.content, known.index)) else None
    except (OSError, ValueError, TypeError):
        return None


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A file to write, which takes its name once it is whole."""
    draft = path.with_name(f".{path.name}.part")
    try:
        yield draft
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def _copy_parquet(path: Path, content: Path, name_key: str, wanted: Sequence[str] | None) -> tuple[Any, str, set[str]]:
    import pyarrow

    starts, names = [0], set()
    with opened(path) as file, _replacing(content) as draft:
        columns = columns_of(file, wanted)
        schema = pyarrow.schema([file.schema_arrow.field(name) for name in columns])
        with pyarrow.OSFile(str(draft), "wb") as sink, pyarrow.ipc.new_file(sink, schema) as writer:
            for batch in batches(file, columns):
                writer.write_batch(batch.select(columns))
                starts.append(starts[-1] + batch.num_rows)
                names |= _names_of(batch, name_key)
    with open_regular(path, FIX) as raw:
        digest = hashlib.sha256()
        while block := raw.read(HASHED_BYTES):
            digest.update(block)
    return np.array(starts, np.int64), digest.hexdigest(), names


def _names_of(batch: Any, name_key: str) -> set[str]:
    column, *inner = name_key.split(".") if name_key not in batch.schema.names else [name_key]
    if column not in batch.schema.names:
        return set()
    values: Any = batch.column(column).unique().to_pylist() if not inner else batch.column(column).to_pylist()
    for name in inner:
        values = [value.get(name) for value in values if isinstance(value, Mapping)]
    return {value for value in values if isinstance(value, str) and value}


def _index_jsonl(path: Path, content: Path, kind: Any, name_key: str) -> tuple[Any, str, set[str]]:
    """Reads a file once; gives where its lines begin and end, its digest, and every value that follows the key of rewards' names."""
    last = name_key.rpartition(".")[2]
    pattern = re.compile(re.escape(json.dumps(last).encode()) + rb'\s*:\s*"((?:[^"\\]|\\.){1,%d})"' % LONGEST_NAME) if last else None
    digest, names, parts, rest = hashlib.sha256(), set[str](), [], b""
    base, line = 0, 1
    with ExitStack() as stack:
        copy = stack.enter_context(stack.enter_context(_replacing(content)).open("wb")) if content != path else None
        try:
            for block in blocks(path, kind, HASHED_BYTES):
                digest.update(block)
                if copy:
                    copy.write(block)
                text = rest + block
                if pattern:
                    names |= {_name(found[1]) for found in pattern.finditer(text)}
                cut = text.rfind(b"\n") + 1
                found, line = _lines_of(path, text[:cut], base, line)
                parts.append(found)
                base, rest = base + cut, text[cut:]
                if len(rest) > LONGEST_ROW:
                    raise DataError(f"{path}:{line}: must be at most {LONGEST_ROW // 2**20} MiB long. {FORM}")
        except DamagedError as error:
            raise damaged(path, line - 1, error) from error
    parts.append(_lines_of(path, rest + b"\n", base, line)[0] if rest else np.empty((0, 3), np.int64))
    return np.concatenate(parts), digest.hexdigest(), names


def _lines_of(path: Path, text: bytes, base: int, line: int) -> tuple[Any, int]:
    """First byte, end and number of the lines that are not blank, and the number of the next line. The text ends with a newline."""
    codes = np.frombuffer(text, np.uint8)
    ends = np.flatnonzero(codes == ord("\n"))
    starts = np.concatenate([np.zeros(min(1, len(ends)), np.int64), ends[:-1] + 1])
    longest = int((ends - starts).argmax()) if len(ends) else 0
    if len(ends) and ends[longest] - starts[longest] > LONGEST_ROW:
        raise DataError(f"{path}:{line + longest}: must be at most {LONGEST_ROW // 2**20} MiB long. {FORM}")
    first = codes[starts]
    for number in np.flatnonzero((first <= ord(" ")) | (first >= 0x80)):  # may be blank
        raw = text[starts[number] : ends[number]]
        if not (raw.removeprefix(BOM) if line + number == 1 else raw).decode("utf-8", "replace").strip():
            ends[number] = -1
    kept = np.flatnonzero(ends >= 0)
    return np.stack([starts[kept] + base, ends[kept] + base, kept + line], axis=1), line + len(ends)


def _name(raw: bytes) -> str:
    try:
        return str(json.loads(b'"' + raw + b'"'))
    except ValueError:
        return ""
