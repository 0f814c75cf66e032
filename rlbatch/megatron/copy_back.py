"""Copies weights between the host, where they are fp32, and the GPU through page-locked memory of bounded size."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

BUFFER_BYTES = 64 * 2**20
"""Size of each of the two buffers, bytes."""


class CopyBack:
    """Two buffers in the GPU's type: one is on its way from or to the GPU while the other is filled or emptied.

    torch's own copies between fp32 on the host and bf16 on the GPU make new memory for each tensor, and wait.

    Args:
        memory: Page-locked memory of both buffers.
        stream: Stream of the copies; None if there is no GPU.
    """

    def __init__(self, memory: Tensor, stream: Any) -> None:
        self._buffers, self._stream = memory.chunk(2), stream
        self._copied: list[Any] = [None, None]
        self._turn = 0

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copies ``source``, on the host, into ``target``, complete once the stream is done. Both are contiguous and equally long."""
        size = len(self._buffers[0]) // target.element_size()
        for into, values in zip(target.view(-1).split(size), source.view(-1).split(size), strict=True):
            buffer = self._buffers[self._turn][: into.nbytes].view(into.dtype)
            if self._copied[self._turn] is not None:
                self._copied[self._turn].synchronize()
            buffer.copy_(values)
            with torch.cuda.stream(self._stream) if self._stream is not None else nullcontext():
                into.copy_(buffer, non_blocking=True)
            self._copied[self._turn] = None if self._stream is None else self._stream.record_event()
            self._turn = 1 - self._turn

    def fetch(self, target: Tensor, source: Tensor) -> None:
        """Copies ``source``, on the GPU, into ``target``, complete when this returns. Both are contiguous and equally long."""
        size = len(self._buffers[0]) // source.element_size()
        coming: list[tuple[Tensor, Tensor, Any]] = []
        for into, values in zip(target.view(-1).split(size), source.view(-1).split(size), strict=True):
            buffer = self._buffers[self._turn][: values.nbytes].view(values.dtype)
            if self._copied[self._turn] is not None:
                self._copied[self._turn].synchronize()
            with torch.cuda.stream(self._stream) if self._stream is not None else nullcontext():
                buffer.copy_(values, non_blocking=True)
            self._copied[self._turn] = None if self._stream is None else self._stream.record_event()
            coming.append((into, buffer, self._copied[self._turn]))
            self._turn = 1 - self._turn
            if len(coming) == 2:
                _arrive(*coming.pop(0))
        for each in coming:
            _arrive(*each)


def _arrive(target: Tensor, buffer: Tensor, copied: Any) -> None:
    """Takes values out of a buffer once they are there."""
    if copied is not None:
        copied.synchronize()
    target.copy_(buffer)
