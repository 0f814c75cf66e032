"""Frees the memory of gradient buffers, which hold nothing of use between an update and the next backward pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor


class GradientMemory:
    """Frees and restores the storage of gradient buffers. The buffers remain, and with them every parameter's view of its part.

    Args:
        chunks: Model chunks of this rank; each has buffers for dense parameters and for experts.
        optimizer: Optimizer of these chunks, which may still hold views of the last gradients.
    """

    def __init__(self, chunks: Sequence[DistributedDataParallel], optimizer: Any) -> None:
        self._chunks, self._optimizer = chunks, optimizer

    def release(self) -> None:
        """Frees the storage; may be called again. Nothing may read a gradient until ``restore``."""
        if not self.num_bytes:
            return
        self._optimizer.zero_grad()
        for optimizer in self._optimizer.chained_optimizers:
            hybrid_part = getattr(optimizer.optimizer, "gpu_optimizer", None)  # of HybridDeviceOptimizer, whose zero_grad leaves it out
            if hybrid_part is not None:
                hybrid_part.zero_grad()
        torch.cuda.synchronize()  # copies to the host may read them on a stream of their own
        for buffer in self._buffers():
            buffer.untyped_storage().resize_(0)
        torch.cuda.empty_cache()  # else a weight sync could copy into this memory, and the engine keep it open

    def restore(self) -> None:
        """Restores freed storage, filled with zeros; gradients that are in place are kept."""
        for buffer in self._buffers():
            if buffer.untyped_storage().nbytes() < buffer.nbytes:
                buffer.untyped_storage().resize_(buffer.nbytes)
                buffer.zero_()

    def shards(self) -> Iterator[Tensor]:
        """Yields this rank's part of every bucket of reduced gradients, which its optimizer uses."""
        for chunk in self._chunks:
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
                group = buffer.data_parallel_group
                yield from (bucket.grad_data.chunk(group.size())[group.rank()] for bucket in buffer.buckets)

    @property
    def num_bytes(self) -> int:
        """Bytes that the buffers take now."""
        return sum(buffer.untyped_storage().nbytes() for buffer in self._buffers())

    def _buffers(self) -> Iterator[Tensor]:
        for chunk in self._chunks:
            yield from (buffer.grad_data for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers))
