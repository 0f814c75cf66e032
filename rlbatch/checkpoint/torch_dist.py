"""torch_dist checkpoints (``torch.distributed.checkpoint``'s files with Megatron's conventions), tensor by tensor.

A folder has ``.metadata`` (which chunk of which tensor lies where), ``*.distcp`` (chunks, each an archive of ``torch.save``), ``common.pt``
(plain values) and ``metadata.json`` (the format's name). Megatron's own writer and reader hold a rank's whole state; these hold a chunk.
"""

from __future__ import annotations

import io
import itertools
import json
import math
import os
import pickle
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from rlbatch.api import DataError
from rlbatch.checkpoint import archive
from rlbatch.checkpoint.origin import FORMAT, METADATA
from rlbatch.checkpoint.reading import Reading, check_finite
from rlbatch.checkpoint.unpickle import read_metadata

COMMON = "common.pt"
CHUNK_SUFFIX = ".distcp"
EMPTY = f"__empty{CHUNK_SUFFIX}"
OPEN_FILES = 256
"""Most files that are open at once: a checkpoint may have thousands."""


@dataclass(frozen=True)
class Chunk:
    """One stored piece of a tensor.

    Attributes:
        key: The tensor's key.
        dtype: The piece's dtype.
        shape: Shape of the whole tensor.
        offset: First index of the piece in the tensor, in each dimension.
        size: Size of the piece, in each dimension.
        file: Name of the file with it.
        start: First byte of its archive in the file.
        length: Bytes of its archive.
    """

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    size: tuple[int, ...]
    file: str
    start: int
    length: int


def small_files(chunks: Iterable[Chunk], empty_objects: Sequence[str] = (), common: Mapping[str, Any] | None = None) -> dict[str, bytes]:
    """What makes a folder with chunk files a checkpoint: name -> content.

    Args:
        chunks: All that the files hold. A tensor whose pieces have several types is described by the widest.
        empty_objects: Keys of Megatron's objects that hold None; they share one file.
        common: Plain values.
    """
    tensors: dict[str, TensorStorageMetadata] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    for chunk in chunks:
        stored = tensors.setdefault(chunk.key, TensorStorageMetadata(TensorProperties(dtype=chunk.dtype), torch.Size(chunk.shape), []))
        stored.properties.dtype = torch.promote_types(stored.properties.dtype, chunk.dtype)
        stored.chunks.append(ChunkStorageMetadata(torch.Size(chunk.offset), torch.Size(chunk.size)))
        places[MetadataIndex(chunk.key, chunk.offset)] = _StorageInfo(chunk.file, chunk.start, chunk.length)
    nothing = _saved([None])
    places |= {MetadataIndex(key): _StorageInfo(EMPTY, 0, len(nothing)) for key in empty_objects}
    described: dict[str, Any] = {**tensors, **{index.fqn: BytesStorageMetadata() for index in places if index.fqn not in tensors}}
    backends = {"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch", "common_backend_version": 1}
    metadata = Metadata(described, planner_data={}, storage_data=places, version=CURRENT_DCP_VERSION)
    described_by = {COMMON: _saved(dict(common or {})), METADATA: pickle.dumps(metadata), FORMAT: json.dumps(backends).encode()}
    return described_by | ({EMPTY: nothing} if empty_objects else {})


def _saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


class TorchDist:
    """The tensors of a torch_dist checkpoint, read from disk when asked for; several threads may ask.

    Args:
        folder: The checkpoint's folder.
        reading: How it is read.

    Attributes:
        folder: The same.

    Raises:
        DataError: no readable metadata, or a file that it names is missing or too short.
    """

    def __init__(self, folder: Path, reading: Reading | None = None) -> None:
        self.folder, self._reading = folder, reading or Reading()
        self._metadata = read_metadata(folder)
        entries = self._metadata.state_dict_metadata.items()
        self._tensors = {key: stored for key, stored in entries if isinstance(stored, TensorStorageMetadata)}
        self._files: dict[str, IO[bytes]] = {}
        self._grids: dict[str, _Grid] = {}
        self._lock = threading.Lock()
        self._check_files()

    def __enter__(self) -> TorchDist:
        """Returns itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Closes the files."""
        for file in self._files.values():
            file.close()
        self._files = {}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Key -> shape, of every tensor."""
        return {key: tuple(stored.size) for key, stored in self._tensors.items()}

    def dtype(self, key: str) -> torch.dtype:
        """The dtype of a tensor that is there."""
        return self._tensors[key].properties.dtype

    def read(self, key: str, starts: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """A box of a tensor, put together from the chunks that it touches.

        Args:
            key: The tensor's key.
            starts: First index of each dimension.
            sizes: Size of the box in each dimension.

        Raises:
            DataError: no such tensor, chunks that leave a hole, or a damaged file.
        """
        touched = self._touched(key, starts, sizes)
        box = torch.empty(tuple(sizes), dtype=self.dtype(key))
        self._fill(box, key, starts, touched)
        return box

    def read_into(self, target: Tensor, key: str, starts: Sequence[int]) -> None:
        """Copies a box of a tensor, as of ``read``, to a target of its sizes, on any device and in any dtype.

        At most ``codec.CHUNK_BYTES`` are read at once, however large the chunks are.
        """
        self._fill(target, key, starts, self._touched(key, starts, target.shape))

    def _fill(self, target: Tensor, key: str, starts: Sequence[int], touched: Sequence[_Touched]) -> None:
        for chunk, first, extent in touched:
            place = tuple(slice(f - s, f - s + size) for f, s, size in zip(first, starts, extent, strict=True))
            self._fill_from(target[place], key, chunk, [f - o for f, o in zip(first, chunk.offsets, strict=True)])

    def _touched(self, key: str, starts: Sequence[int], sizes: Sequence[int]) -> list[_Touched]:
        touched = list(self._grid(key).touching(starts, sizes))
        if sum(math.prod(extent) for _, _, extent in touched) != math.prod(sizes):
            raise DataError(f"{self.folder}: chunks of {key} do not cover {list(starts)} + {list(sizes)} once. Convert it anew.")
        return touched

    def _grid(self, key: str) -> _Grid:
        if key not in self._grids:
            if key not in self._tensors:
                raise DataError(f"{self.folder}: no tensor {key}. The checkpoint is another model's, or incomplete.")
            self._grids[key] = _Grid(self._tensors[key].chunks)
        return self._grids[key]

    def _fill_from(self, target: Tensor, key: str, chunk: ChunkStorageMetadata, starts: Sequence[int]) -> None:
        place = self._metadata.storage_data.get(MetadataIndex(key, chunk.offsets))
        if place is None:
            raise DataError(f"{self.folder / METADATA}: does not say where {key} at {list(chunk.offsets)} lies. Convert it anew.")
        try:
            with self._opened(place.relative_path) as descriptor:
                layout = archive.find(descriptor, place.offset, place.length)
                if layout.shape != tuple(chunk.sizes):
                    where = f"{key} has shape {layout.shape} at byte {place.offset}"
                    raise pickle.UnpicklingError(f"{where}, metadata says {tuple(chunk.sizes)}")
                for values in archive.filled(target, descriptor, layout, starts, once=self._reading.once):
                    if self._reading.finite:
                        check_finite(values.contiguous(), f"{self.folder / place.relative_path}: {key}")
        except (pickle.UnpicklingError, OSError, EOFError) as error:
            raise DataError(f"{self.folder / place.relative_path}: cannot be read ({error}). Restore the file.") from error

    @contextmanager
    def _opened(self, name: str) -> Iterator[int]:
        """A file's descriptor for this caller alone: another thread may close the file in the meantime."""
        with self._lock:
            if name not in self._files:
                if len(self._files) == OPEN_FILES:
                    self._files.pop(next(iter(self._files))).close()
                self._files[name] = (self.folder / name).open("rb", buffering=0)
            descriptor = os.dup(self._files[name].fileno())
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def _check_files(self) -> None:
        ends: dict[str, int] = {}
        for info in self._metadata.storage_data.values():
            ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
        for name, end in ends.items():
            path = self.folder / name
            if not path.is_file():
                raise DataError(f"{path}: is missing, the metadata names it. The checkpoint is incomplete: restore the file.")
            if (found := path.stat().st_size) < end:
                raise DataError(f"{path}: has {found} bytes, the metadata speaks of {end}. The checkpoint is incomplete: restore the file.")


_Touched = tuple[ChunkStorageMetadata, list[int], list[int]]
"""A chunk, where what is wanted of it starts in the tensor, and its size."""


class _Grid:
    """A tensor's chunks by the leading dimensions in which each is one wide (layers, experts): there may be tens of thousands."""

    def __init__(self, chunks: Sequence[ChunkStorageMetadata]) -> None:
        dimensions = len(chunks[0].sizes) if chunks else 0
        self._lead = next((axis for axis in range(dimensions) if any(chunk.sizes[axis] != 1 for chunk in chunks)), dimensions)
        self._chunks: dict[tuple[int, ...], list[ChunkStorageMetadata]] = {}
        for chunk in chunks:
            self._chunks.setdefault(tuple(chunk.offsets[: self._lead]), []).append(chunk)

    def touching(self, starts: Sequence[int], sizes: Sequence[int]) -> Iterable[_Touched]:
        """Chunks that share elements with a box."""
        ranges = (range(start, start + size) for start, size in zip(starts[: self._lead], sizes[: self._lead], strict=True))
        for place in itertools.product(*ranges):
            for chunk in self._chunks.get(place, ()):
                first = [max(start, offset) for start, offset in zip(starts, chunk.offsets, strict=True)]
                ends = (min(s + n, o + m) for s, n, o, m in zip(starts, sizes, chunk.offsets, chunk.sizes, strict=True))
                extent = [end - begin for end, begin in zip(ends, first, strict=True)]
                if all(size > 0 for size in extent):
                    yield chunk, first, extent
