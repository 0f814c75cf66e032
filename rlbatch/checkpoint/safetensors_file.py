"""One safetensors file, read by ranges: a header that is checked against the file's size, and the bytes of a slice, no more.

The library's own slices map the file: pages that were read stay in the process's memory. Here they do not.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from rlbatch.api import DataError
from rlbatch.checkpoint.hf_index import TensorEntry, damaged, read_header
from rlbatch.checkpoint.reading import Reading, read_into

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""The format's names of dtypes -> torch's dtypes."""
PAGE = 4096
"""Bytes that a file system reads at least."""
SPAN_BYTES = 8 * 2**20
"""Most bytes of a read that also fetches what lies between the values asked for."""


class SafetensorsFile:
    """A file's tensors; several threads may read them.

    Args:
        path: The file.
        reading: How its tensors are read.
        entries: What its header says, if that was read.

    Attributes:
        entries: The file's tensors, by name.
        bytes_read: Bytes of tensors that were read so far.

    Raises:
        DataError: not a whole safetensors file.
    """

    def __init__(self, path: Path, reading: Reading | None = None, entries: Mapping[str, TensorEntry] | None = None) -> None:
        self.path, self.reading = path, reading or Reading()
        self.bytes_read = 0
        self._lock = threading.Lock()
        self._file: Any = None
        self.entries = read_header(path) if entries is None else entries

    def read(self, entry: TensorEntry, ranges: Sequence[range]) -> Tensor:
        """A part of a tensor, in memory of its own.

        Only its bytes are read; but where it has gaps of less than a page, they are read with it, as the disk does anyway.

        Args:
            entry: One of ``entries``, of a dtype in ``DTYPES``.
            ranges: Indices of step 1 in each dimension.
        """
        target = torch.empty([len(indices) for indices in ranges], dtype=DTYPES[entry.dtype])
        self.read_into(target, entry, ranges)
        return target

    def read_into(self, target: Tensor, entry: TensorEntry, ranges: Sequence[range]) -> None:
        """Reads, as ``read``, into a contiguous host tensor of the entry's type and the ranges' lengths."""
        if target.numel():
            self._read_runs(entry, ranges, target.itemsize, target.view(-1).view(torch.uint8))

    def _read_runs(self, entry: TensorEntry, ranges: Sequence[range], itemsize: int, data: Tensor) -> None:
        split = len(ranges)  # from this dimension on, all is wanted: it lies in one run
        while split and len(ranges[split - 1]) == entry.shape[split - 1]:
            split -= 1
        strides = [math.prod(entry.shape[dim + 1 :]) * itemsize for dim in range(split)]
        first = entry.start + sum(stride * indices.start for stride, indices in zip(strides, ranges, strict=False))
        if split <= 1:
            self._pread(first, data)
            return
        run = len(ranges[split - 1]) * strides[-1]
        if split == 2 and strides[0] - run < PAGE:
            self._read_span(first, strides[0], run, data.view(-1, run))
            return
        places = itertools.product(*(range(len(indices)) for indices in ranges[: split - 1]))
        for target, place in zip(data.split(run), places, strict=True):
            self._pread(first + sum(stride * step for stride, step in zip(strides, place, strict=False)), target)

    def _read_span(self, start: int, stride: int, run: int, target: Tensor) -> None:
        """Reads [rows, run] uint8 into ``target``; in the file, rows begin ``stride`` bytes apart."""
        rows = max(1, SPAN_BYTES // stride)
        for row in range(0, len(target), rows):
            part = target[row : row + rows]
            span = torch.empty((len(part) - 1) * stride + run, dtype=torch.uint8)
            self._pread(start + row * stride, span)
            part.copy_(span.as_strided(part.shape, (stride, 1)))

    def _pread(self, start: int, target: Tensor) -> None:
        try:
            read_into(self._descriptor.fileno(), memoryview(cast(Any, target.numpy())), start, once=self.reading.once)
        except OSError as error:
            raise DataError(f"{self.path}: cannot be read ({error.strerror}). Look at the folder.") from error
        except EOFError as error:
            raise damaged(self.path, "it has become shorter") from error
        with self._lock:
            self.bytes_read += target.nbytes

    @property
    def _descriptor(self) -> Any:
        with self._lock:
            self._file = self._file or self.path.open("rb", buffering=0)
        return self._file


HEADER_ROOM = 2**20
"""Bytes kept before the tensors for the header, which says where they lie and is known last; the format lets it end in spaces."""
NAMES = {dtype: name for name, dtype in DTYPES.items()}


class SafetensorsWriter:
    """A file that is being written; valid once it is closed.

    Args:
        path: The file to make; replaced if it exists.

    Attributes:
        nbytes: Bytes of the tensors written so far.
    """

    def __init__(self, path: Path) -> None:
        self.nbytes = 0
        self._header = '{"__metadata__":{"format":"pt"}'
        self._file = path.open("wb")
        self._file.seek(8 + HEADER_ROOM)

    def fits(self, name: str, tensor: Tensor) -> bool:
        """Whether there is room in the header, and the tensor would begin at a multiple of its elements' size, as readers expect."""
        return len(self._header) + len(self._described(name, tensor)) < HEADER_ROOM and self.nbytes % tensor.itemsize == 0

    def write(self, name: str, tensor: Tensor) -> None:
        """Appends a tensor from any device."""
        self._header += self._described(name, tensor)
        flat = tensor.detach().to("cpu").contiguous().view(-1).view(torch.uint8)
        self._file.write(memoryview(cast(Any, flat.numpy())))
        self.nbytes += tensor.nbytes

    def close(self) -> None:
        """Writes the header, and returns when everything is on the disk."""
        with self._file as file:
            file.seek(0)
            file.write(HEADER_ROOM.to_bytes(8, "little") + f"{self._header}}}".encode().ljust(HEADER_ROOM))
            file.flush()
            os.fsync(file.fileno())

    def _described(self, name: str, tensor: Tensor) -> str:
        offsets = [self.nbytes, self.nbytes + tensor.nbytes]
        entry = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        return f",{json.dumps(name)}:{json.dumps(entry, separators=(',', ':'))}"
