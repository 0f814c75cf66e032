"""One tensor as the archive that ``torch.save`` writes and ``torch.load`` reads, inside a larger file: written in parts, and read in part.

``torch.load`` can only read a whole tensor; here any run of a tensor's bytes is read without the rest.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import IO, Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.utils import _create_file_view

from rlbatch.checkpoint.reading import read_into

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
"""Less is copied; what torch writes around a tensor is less."""


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
    return made


def raw_bytes(tensor: Tensor) -> memoryview:
    """A contiguous host tensor's own memory."""
    view: Any = tensor.reshape(-1).view(torch.uint8).numpy() if tensor.numel() else b""
    return memoryview(view)


@dataclass(frozen=True)
class ArchiveLayout:
    """The places in an archive that keep its tensor.

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


def find(file: IO[bytes], offset: int, length: int) -> ArchiveLayout:
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
    return ArchiveLayout(offset + start, nbytes, dtype, first, tuple(shape), tuple(strides))


def read_box(descriptor: int, layout: ArchiveLayout, starts: Sequence[int], sizes: Sequence[int], *, once: bool = False) -> Tensor:
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
