"""``offload=none``: weights, gradients, optimizer state and engine share the accelerator's memory; nothing moves."""

from collections.abc import Mapping

from rlbatch.api import NoOptions, OffloadMemory, OffloadSpec, OffloadStrategy, hookimpl


class NoOffload(OffloadStrategy):
    """Leaves everything where it is."""


@hookimpl
def rlbatch_register_offload_strategies() -> Mapping[str, OffloadSpec]:
    """Supplies ``none``."""
    return {"none": OffloadSpec(lambda options: NoOffload(), NoOptions, memory=lambda options, precision: OffloadMemory())}
