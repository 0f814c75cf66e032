"""``offload=optimizer_state``: main weights and moments leave the GPU while the engine generates, and come back to be updated there.

Gradients, of no use between updates, give their memory back; the trainer's weights may leave too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rlbatch.api import OffloadMemory, OffloadSpec, hookimpl
from rlbatch.api.values import option

from .offload_parts.moving_strategy import Moving


@dataclass(frozen=True)
class OptimizerStateOptions:
    """``offload.options.*``"""

    weights: bool = option(False, "Whether the trainer's weights leave the GPU too, between a weight sync and the end of generation.")
    pin_memory: bool = option(True, "Page-locked host memory: faster copies, but the host cannot swap it.")


@hookimpl
def rlbatch_register_offload_strategies() -> Mapping[str, OffloadSpec]:
    """Supplies ``optimizer_state``."""
    return {
        "optimizer_state": OffloadSpec(
            lambda options: Moving(state=True, weights=options.weights, is_pinned=options.pin_memory),
            OptimizerStateOptions,
            memory=lambda options, precision: OffloadMemory(releases_gradients=True, moves_state=True, moves_weights=options.weights),
            advised=({}, {"weights": True}),
        )
    }
