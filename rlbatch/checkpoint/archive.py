"""One tensor as the zip archive that ``torch.save`` writes and ``torch.load`` reads, written and read in place inside a larger file.

``torch.save`` itself computes its checksum at a third of a gigabyte a second, and ``torch.load`` can only read a whole tensor; here writing
costs one pass of zlib's, and any run of a tensor's bytes can be read without the rest.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.utils import _create_file_view

from rlbatch.checkpoint.crc import Checked
from rlbatch.checkpoint.reading import read_into

STORAGES = {
    torch.float32: "FloatStorage",
    torch.float64: "DoubleStorage",
    torch.float16: "HalfStorage",
    torch.bfloat16: "BFloat16Storage",
    torch.int64: "LongStorage",
    torch.int32: "IntStorage",
    torch.uint8: "ByteStorage",
    torch.bool: "BoolStorage",
}
"""torch's names of typed storages, of the types that checkpoints hold."""
DTYPES = {name: dtype for dtype, name in STORAGES.items()}

_NAME = "archive"
_ALIGNMENT = 64
_LOCAL, _CENTRAL, _END = 0x04034B50, 0x02014B50, 0x06054B50
LARGEST_TENSOR_BYTES = 2**31
"""Of an archive without zip64; larger tensors are stored in several."""


class _Storage:
    """Stands for a tensor's storage in its pickle."""

    def __init__(self, dtype: torch.dtype, length: int) -> None:
        self.reference = ("storage", getattr(torch, STORAGES[dtype]), "0", "cpu", length)


class _Rebuilt:
    """Pickles as a contiguous tensor does."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        self._shape, self._dtype = tuple(shape), dtype

    def __reduce__(self) -> tuple[Any, ...]:
        strides, step = [], 1
        for size in reversed(self._shape):
            strides.append(step)
            step *= size
        length = torch.Size(self._shape).numel()
        arguments: tuple[Any, ...] = (_Storage(self._dtype, length), 0, self._shape, tuple(reversed(strides)), False, OrderedDict())
        return torch._utils._rebuild_tensor_v2, arguments


class _Pickler(pickle.Pickler):
    def persistent_id(self, value: Any) -> Any:
        return value.reference if isinstance(value, _Storage) else None


def parts(tensor: Tensor) -> Iterator[bytes | Checked]:
    """The archive of a tensor, to be written one part after the other; its values are read once, for their checksum.

    Args:
        tensor: Contiguous, on the host, of a type in ``STORAGES``, smaller than ``LARGEST_TENSOR_BYTES``.
    """
    values = Checked.of(raw_bytes(tensor))
    position, central, records = 0, b"", _records(tensor.shape, tensor.dtype)
    for record, small in records.items():
        content = values if small is None else Checked.of(memoryview(small))
        header = _local_header(record, position)
        checked = struct.pack("<III", content.crc32, len(content.data), len(content.data))
        yield header[:14] + checked + header[26:]
        yield values if small is None else small
        name = f"{_NAME}/{record}".encode()
        central += struct.pack("<IHHHHHH", _CENTRAL, 0, 0, 0, 0, 0, 0) + checked
        central += struct.pack("<HHHHHII", len(name), 0, 0, 0, 0, 0, position) + name
        position += len(header) + len(content.data)
    yield central + struct.pack("<IHHHHIIH", _END, 0, 0, len(records), len(records), len(central), position, 0)


def length(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Bytes of a tensor's archive."""
    position = 22
    for record, small in _records(shape, dtype).items():
        content = torch.Size(shape).numel() * dtype.itemsize if small is None else len(small)
        position += len(_local_header(record, position - 22)) + content
    return position + sum(46 + len(f"{_NAME}/{record}") for record in _records(shape, dtype))


def _records(shape: Sequence[int], dtype: torch.dtype) -> dict[str, bytes | None]:
    """Name -> content of the archive's files; None for the tensor's values."""
    pickled = io.BytesIO()
    _Pickler(pickled, protocol=2).dump(_Rebuilt(shape, dtype))
    return {"data.pkl": pickled.getvalue(), "byteorder": b"little", "data/0": None, "version": b"3\n"}


def _local_header(record: str, position: int) -> bytes:
    """With checksum and sizes 0; padded so that the content is aligned in the archive."""
    name = f"{_NAME}/{record}".encode()
    padding = -(position + 30 + len(name) + 4) % _ALIGNMENT
    extra = struct.pack("<2sH", b"FB", padding) + b"Z" * padding
    return struct.pack("<IHHHHHIIIHH", _LOCAL, 0, 0, 0, 0, 0, 0, 0, 0, len(name), len(extra)) + name + extra


def raw_bytes(tensor: Tensor) -> memoryview:
    """A contiguous host tensor's own memory."""
    view: Any = tensor.reshape(-1).view(torch.uint8).numpy() if tensor.numel() else b""
    return memoryview(view)


@dataclass(frozen=True)
class Layout:
    """Where an archive keeps its tensor.

    Attributes:
        start: Of the storage, bytes from the file's start.
        nbytes: Of the storage.
        dtype: Of the tensor.
        first: Element of the storage at which the tensor starts.
        shape: Of the tensor.
        strides: Of the tensor, in elements.
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


def find(file: IO[bytes], offset: int, length: int) -> Layout:
    """Reads an archive's directory.

    Args:
        file: Open for reading.
        offset: Of the archive, bytes.
        length: Of the archive, bytes.

    Raises:
        pickle.UnpicklingError: it is not a tensor's archive.
    """
    try:
        reader: Any = torch._C.PyTorchFileReader(cast("IO[bytes]", _create_file_view(cast("io.IOBase", file), offset, length)))
        (dtype, key), first, shape, strides = _LayoutUnpickler(io.BytesIO(reader.get_record("data.pkl"))).load()
        start, nbytes = reader.get_record_offset(f"data/{key}"), reader.get_record_size(f"data/{key}")
        last = first + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        is_inside = min(first, *shape, *strides, 0) == 0 and (last + 1) * dtype.itemsize <= nbytes and start + nbytes <= length
    except pickle.UnpicklingError:
        raise
    except (RuntimeError, AttributeError, EOFError, IndexError, KeyError, OverflowError, TypeError, ValueError) as error:
        text = (str(error).strip().splitlines() or [""])[0]
        raise pickle.UnpicklingError(f"the archive at byte {offset} is damaged ({type(error).__name__}: {text})") from error
    if 0 not in shape and not is_inside:
        raise pickle.UnpicklingError(f"the archive at byte {offset} holds less than its tensor of shape {tuple(shape)}")
    return Layout(offset + start, nbytes, dtype, first, tuple(shape), tuple(strides))


def read_box(descriptor: int, layout: Layout, starts: Sequence[int], sizes: Sequence[int], *, once: bool = False) -> Tensor:
    """Part of a tensor; reads from its first to its last element and nothing else.

    Args:
        descriptor: Of the file.
        layout: Of the archive.
        starts: First index of each dimension.
        sizes: Of each dimension.
        once: As of ``reading.Reading``.

    Returns:
        The part, perhaps a strided view of what was read.

    Raises:
        OSError: it cannot be read.
        EOFError: the file ends before it.
    """
    first = layout.first + sum(start * stride for start, stride in zip(starts, layout.strides, strict=True))
    span = 1 + sum((size - 1) * stride for size, stride in zip(sizes, layout.strides, strict=True))
    if 0 in sizes:
        return torch.empty(tuple(sizes), dtype=layout.dtype)
    read = torch.empty(span, dtype=layout.dtype)
    read_into(descriptor, raw_bytes(read), layout.start + first * layout.dtype.itemsize, once=once)
    return read.as_strided(tuple(sizes), layout.strides)
