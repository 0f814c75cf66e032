"""``offload=optimizer_state``: main weights and moments leave the GPU while the engine generates, and come back to be updated there.

Gradients, of no use between updates, give their memory back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlbatch.api import OffloadMemory, OffloadSpec, hookimpl
from rlbatch.api.values import option

from .offload_gradients import ReleasedGradients

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class OptimizerStateOptions:
    """``offload.options.*``"""

    pin_memory: bool = option(True, "Page-locked host memory: faster copies, but the host cannot swap it.")


class OptimizerState(ReleasedGradients):
    """An ``OffloadStrategy`` that empties the tensors' storage in between; the tensors stay, so that the optimizer finds them again."""

    def __init__(self, options: OptimizerStateOptions) -> None:
        super().__init__()
        self._pin = options.pin_memory
        self._host: list[Tensor] = []

    @contextmanager
    def generating(self) -> Iterator[None]:
        """Host copies, no GPU storage; back again at the end, also after an error. Adam makes its moments at the first update only."""
        with super().generating():
            moved = self._to_host()
            try:
                yield
            finally:
                self._to_device(moved)

    def _to_host(self) -> list[Tensor]:
        import torch

        assert self._handles is not None
        moved = [tensor for tensor in self._handles.optimizer_state() if tensor.is_cuda and _owns_storage(tensor)]
        if not moved:
            return []
        if [copy.shape for copy in self._host] != [tensor.shape for tensor in moved]:
            self._host = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self._pin) for tensor in moved]
        for tensor, copy in zip(moved, self._host, strict=True):
            copy.copy_(tensor, non_blocking=True)
        torch.cuda.synchronize()  # storage may go only after its copy
        for tensor in moved:
            tensor.untyped_storage().resize_(0)
        torch.cuda.empty_cache()
        return moved

    def _to_device(self, moved: list[Tensor]) -> None:
        import torch

        for tensor, copy in zip(moved, self._host, strict=False):  # nothing moved: nothing to bring back
            tensor.untyped_storage().resize_(tensor.nbytes)
            tensor.copy_(copy, non_blocking=True)
        if moved:
            torch.cuda.synchronize()


def _owns_storage(tensor: Tensor) -> bool:
    """Whether the storage holds this tensor and nothing else."""
    return tensor.numel() > 0 and tensor.untyped_storage().nbytes() == tensor.nbytes


def memory(options: OptimizerStateOptions, precision: str) -> OffloadMemory:
    """See ``OffloadSpec``."""
    return OffloadMemory(releases_gradients=True, moves_state=True)


@hookimpl
def rlbatch_register_offload_strategies() -> Mapping[str, OffloadSpec]:
    """Supplies ``optimizer_state``."""
    return {"optimizer_state": OffloadSpec(OptimizerState, OptimizerStateOptions, needs_gpu=True, memory=memory)}
