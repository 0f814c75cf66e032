"""One safetensors file, written tensor by tensor: memory holds none of it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from rlbatch.checkpoint.safetensors_file import DTYPES

HEADER_ROOM = 2**20
"""Bytes kept before the tensors for the header, which says where they lie and is known last; the format lets it end in spaces."""
NAMES = {dtype: name for name, dtype in DTYPES.items()}


class SafetensorsWriter:
    """A file that is being written; valid once it is closed.

    Args:
        path: To be made; replaced if it exists.

    Attributes:
        nbytes: Of the tensors written so far.
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
