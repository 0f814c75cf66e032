"""``offload=none``: weights, gradients, optimizer state and engine share the accelerator's memory; nothing moves."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

from rlbatch.api import MemoryHandles, NoOptions, OffloadMemory, OffloadSpec, OffloadStrategy, OptimizerSpec, hookimpl


class NoOffload:
    """Leaves everything where it is."""

    def configure_optimizer(self, spec: OptimizerSpec) -> OptimizerSpec:
        """The spec, unchanged."""
        return spec

    def attach(self, handles: MemoryHandles) -> None:
        """Needs no handles."""

    def generating(self) -> AbstractContextManager[None]:
        """Moves nothing."""
        return nullcontext()

    def training(self) -> AbstractContextManager[None]:
        """Moves nothing."""
        return nullcontext()


def build(options: NoOptions) -> OffloadStrategy:
    """The strategy of one rank."""
    return NoOffload()


def memory(options: NoOptions, precision: str) -> OffloadMemory:
    """See ``OffloadSpec``."""
    return OffloadMemory()


@hookimpl
def rlbatch_register_offload_strategies() -> Mapping[str, OffloadSpec]:
    """Supplies ``none``."""
    return {"none": OffloadSpec(build, NoOptions, memory=memory)}
