"""``offload=weights``: the trainer's weights leave the GPU once the engine has them, and come back when it has generated.

Gradients give their memory back; the optimizer stays. ``offload=optimizer_state`` and ``cpu_adam`` have an option for the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rlbatch.api import OffloadMemory, OffloadSpec, hookimpl
from rlbatch.api.values import option

from .offload_parts.moving_strategy import Moving


@dataclass(frozen=True)
class WeightsOptions:
    """``offload.options.*``"""

    pin_memory: bool = option(True, "Page-locked host memory: faster copies, but the host cannot swap it.")


@hookimpl
def rlbatch_register_offload_strategies() -> Mapping[str, OffloadSpec]:
    """Supplies ``weights``."""
    return {
        "weights": OffloadSpec(
            lambda options: Moving(state=False, weights=True, is_pinned=options.pin_memory),
            WeightsOptions,
            memory=lambda options, precision: OffloadMemory(releases_gradients=True, moves_weights=True),
        )
    }
