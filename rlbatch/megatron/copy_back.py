"""Copies weights that were updated on the host to the GPU through page-locked memory of bounded size, beside the next update."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

BUFFER_BYTES = 64 * 2**20
"""Size of each of the two buffers, bytes."""


class CopyBack:
    """Two buffers, of which one is filled, in the GPU's type, while the other is copied to the GPU.

    torch's own copy from fp32 on the host to bf16 on the GPU makes new memory for each tensor, and waits.

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
