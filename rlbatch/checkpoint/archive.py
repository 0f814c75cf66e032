"""One tensor as the archive that ``torch.save`` writes and ``torch.load`` reads, inside a larger file: written in parts, and read in part.

``torch.load`` can only read a whole tensor; here any run of a tensor's bytes is read without the rest.
"""

from __future__ import annotations

import io
import os
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import IO, Any, cast

import torch
from torch import Tensor

from rlbatch.checkpoint.reading import passing, read_into
from rlbatch.checkpoint.unpickle import unpickled
from rlbatch.weights.codec import CHUNK_BYTES

DTYPES = {
    "FloatStorage": torch.float32,
    "DoubleStorage": torch.float64,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}
"""torch's names of typed storages, of the types that checkpoints hold."""
SMALL_BYTES = 4096
"""Bytes below which a part is copied; all that torch writes around a tensor is smaller."""
ALIGNMENT = 64
"""An archive's length is a multiple of it: values have places in a file, after other archives, from where they can be used."""
_HEADER = struct.Struct("<4s22xHH")
"""Header of a zip record: its signature, and the lengths of the name and of the extra field before the content."""


def parts(tensor: Tensor) -> Iterator[bytes | memoryview]:
    """The archive of a tensor, to be written one part after the other; its values are not copied.

    Args:
        tensor: Contiguous, on the host.
    """
    # A storage of its own: torch saves whole storages.
    if tensor.numel():
        yield from _saved(torch.frombuffer(raw_bytes(tensor), dtype=tensor.dtype).view(tensor.shape))
    else:
        yield from _saved(torch.empty_like(tensor))


@lru_cache(maxsize=4096)
def length(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Bytes of a tensor's archive. Nothing is written, and memory that is not touched costs nothing."""
    return sum(map(len, _saved(torch.empty(shape, dtype=dtype))))


class _Parts(list[bytes | memoryview]):
    """Takes what ``torch.save`` writes: the tensor's own memory as it is, and copies of all else, which does not last."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__()
        self._nbytes = tensor.nbytes

    def write(self, data: memoryview) -> int:
        if len(data) == self._nbytes >= SMALL_BYTES:
            self.append(data)
        elif self and isinstance(self[-1], bytes):
            self[-1] += bytes(data)
        else:
            self.append(bytes(data))
        return len(data)

    def flush(self) -> None:
        pass


def _saved(tensor: Tensor) -> list[bytes | memoryview]:
    # The archive's own checksums take torch 5 s a GB, and nothing that reads checkpoints looks at them.
    computes = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(tensor, cast("IO[bytes]", made := _Parts(tensor)))
    finally:
        torch.serialization.set_crc32_options(computes)
    rest = -sum(map(len, made)) % ALIGNMENT
    made[-1] = bytes(made[-1])[:-2] + rest.to_bytes(2, "little") + bytes(rest)  # a comment's length, and the comment
    return made


def raw_bytes(tensor: Tensor) -> memoryview:
    """A contiguous host tensor's own memory."""
    view: Any = tensor.reshape(-1).view(torch.uint8).numpy() if tensor.numel() else b""
    return memoryview(view)


@dataclass(frozen=True)
class ArchiveLayout:
    """The places in an archive that keep its tensor.

    Attributes:
        start: First byte of the storage in the file.
        nbytes: Bytes of the storage.
        dtype: The tensor's dtype.
        first: Element of the storage at which the tensor starts.
        shape: The tensor's shape.
        strides: The tensor's strides, in elements.
    """

    start: int
    nbytes: int
    dtype: torch.dtype
    first: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class _LayoutUnpickler(pickle.Unpickler):
    """Reads what a tensor's pickle says about it; builds no tensor and runs nothing."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in DTYPES:
            return DTYPES[name]
        known = {
            ("torch._utils", "_rebuild_tensor_v2"): lambda storage, first, shape, strides, *rest: (storage, first, shape, strides),
            ("torch._utils", "_rebuild_parameter"): lambda tensor, *rest: tensor,
            ("collections", "OrderedDict"): OrderedDict,
        }
        try:
            return known[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"a tensor's archive names {module}.{name}, which is none of a tensor") from None

    def persistent_load(self, reference: Any) -> Any:
        return reference[1], reference[2]


class _Window(io.RawIOBase):
    """A run of a file's bytes as a file."""

    def __init__(self, descriptor: int, offset: int, length: int) -> None:
        super().__init__()
        self._descriptor, self._offset, self._length, self._place = descriptor, offset, length, 0

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        self._place = max(0, offset + (0, self._place, self._length)[whence])
        return self._place

    def read(self, size: int = -1, /) -> bytes:
        left = max(0, self._length - self._place)
        content = os.pread(self._descriptor, left if size < 0 else min(size, left), self._offset + self._place)
        self._place += len(content)
        return content


class _Records:
    """Where an archive's records lie. Only its directory is read: ``torch.save`` packs nothing, and the checksums may be none."""

    def __init__(self, window: _Window) -> None:
        self._window = window
        # The first part of all names is the same, and anything.
        self._found = {info.filename.partition("/")[2]: info for info in zipfile.ZipFile(window).infolist()}

    def __getitem__(self, name: str) -> tuple[int, int]:
        """First byte and number of bytes of a record."""
        info = self._found.get(name)
        if info is None or info.compress_type != zipfile.ZIP_STORED:
            raise zipfile.BadZipFile(f"no record {name}")
        self._window.seek(info.header_offset)
        signature, *lengths = _HEADER.unpack(self._window.read(_HEADER.size))
        if signature != b"PK\x03\x04":
            raise zipfile.BadZipFile(f"no header of {name}")
        return info.header_offset + _HEADER.size + sum(lengths), info.file_size

    def content(self, name: str) -> bytes:
        start, nbytes = self[name]
        self._window.seek(start)
        return self._window.read(nbytes)


def find(descriptor: int, offset: int, length: int) -> ArchiveLayout:
    """Reads an archive's directory.

    Args:
        descriptor: The file's descriptor.
        offset: First byte of the archive.
        length: Bytes of the archive.

    Raises:
        pickle.UnpicklingError: it is not a tensor's archive.
        OSError: it cannot be read.
    """
    try:
        records = _Records(_Window(descriptor, offset, length))
        match unpickled(_LayoutUnpickler(io.BytesIO(records.content("data.pkl")))):
            case ((torch.dtype() as dtype, str(key)), int(first), tuple(shape), tuple(strides)) if _is_box(first, shape, strides):
                start, nbytes = records[f"data/{key}"]
            case _:
                raise pickle.UnpicklingError(f"the archive at byte {offset} holds no tensor")
    except (zipfile.BadZipFile, struct.error, NotImplementedError, UnicodeDecodeError) as error:  # zipfile's, of damage
        if isinstance(error.__context__, OSError):  # which it told as damage
            raise error.__context__ from None
        raise pickle.UnpicklingError(f"the archive at byte {offset} is damaged ({error})") from error
    last = first + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    if 0 not in shape and ((last + 1) * dtype.itemsize > nbytes or start + nbytes > length):
        raise pickle.UnpicklingError(f"the archive at byte {offset} holds less than its tensor of shape {shape}")
    return ArchiveLayout(offset + start, nbytes, dtype, first, shape, strides)


def _is_box(first: int, shape: tuple[Any, ...], strides: tuple[Any, ...]) -> bool:
    return len(shape) == len(strides) and all(type(number) is int and number >= 0 for number in (first, *shape, *strides))


def filled(target: Tensor, descriptor: int, layout: ArchiveLayout, starts: Sequence[int], *, once: bool = False) -> Iterator[Tensor]:
    """Copies a box of a tensor, piece by piece: of each at most ``CHUNK_BYTES`` are read, from its first to its last element.

    Args:
        target: A tensor as large as the box, on any device, in any dtype. What lies there as in the file is read right into it.
        descriptor: The file's descriptor.
        layout: The archive's layout.
        starts: First index of the box in each dimension.
        once: See ``reading.Reading``.

    Yields:
        Each piece as it was read, on the host, perhaps strided, before the next takes its memory.

    Raises:
        OSError: it cannot be read.
        EOFError: the file ends before it.
    """
    for place, sizes in _pieces((0,) * target.dim(), tuple(target.shape), layout.strides, CHUNK_BYTES // layout.dtype.itemsize):
        piece = target[tuple(slice(at, at + size) for at, size in zip(place, sizes, strict=True))]
        first = layout.first + sum((a + b) * stride for a, b, stride in zip(starts, place, layout.strides, strict=True))
        offset, span = layout.start + first * layout.dtype.itemsize, _span(sizes, layout.strides)
        if _is_run(piece, layout):
            read_into(descriptor, raw_bytes(piece), offset, once=once)
            yield piece
        else:
            found = passing(descriptor, span * layout.dtype.itemsize, offset, once=once)
            found = found.copy() if offset % layout.dtype.itemsize else found  # others' archives begin anywhere
            values = torch.from_numpy(found).view(layout.dtype).as_strided(sizes, layout.strides)
            piece.copy_(values)
            yield values


def _is_run(piece: Tensor, layout: ArchiveLayout) -> bool:
    """Whether a piece's memory is what its bytes are in the file."""
    is_alike = all(size == 1 or one == other for size, one, other in zip(piece.shape, piece.stride(), layout.strides, strict=True))
    return is_alike and piece.is_contiguous() and piece.dtype == layout.dtype and piece.device.type == "cpu"


def _pieces(
    start: Sequence[int], sizes: Sequence[int], strides: Sequence[int], most: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """First index and sizes of boxes that have at most so many elements from their first to their last one; none if there are none."""
    if 0 in sizes:
        return
    if (span := _span(sizes, strides)) <= most:
        yield tuple(start), tuple(sizes)
        return
    axis = max((axis for axis, size in enumerate(sizes) if size > 1), key=lambda axis: strides[axis])
    rest = span - (sizes[axis] - 1) * strides[axis]
    step = max(1, (most - rest) // strides[axis] + 1)
    for at in range(0, sizes[axis], step):
        length = min(step, sizes[axis] - at)
        begin = (*start[:axis], start[axis] + at, *start[axis + 1 :])
        yield from _pieces(begin, (*sizes[:axis], length, *sizes[axis + 1 :]), strides, most)


def _span(sizes: Sequence[int], strides: Sequence[int]) -> int:
    """Elements from the first to the last of a box."""
    return 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
