"""``offload=cpu_adam``: a fraction of the optimizer lives on the host: fp32 main weights, moments and their update.

Megatron's ``HybridDeviceOptimizer``: gradients go to the host and new weights come back while other parameters are updated. The GPU is
spared 12 bytes a parameter that is offloaded, divided over data-parallel ranks; the host takes 16. Gradients give their memory back while
the engine generates. The rest of the optimizer, and the trainer's weights, may leave the GPU meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated

from rlbatch.api import ConfigError, OffloadMemory, OffloadSpec, OptimizerSpec, Range, hookimpl
from rlbatch.api.values import option

from .offload_parts.moving_strategy import Moving

HOST_BYTES = 16
"""Bytes on the host for each parameter: fp32 main weight, gradient and two moments."""


@dataclass(frozen=True)
class CpuAdamOptions:
    """``offload.options.*``"""

    fraction: Annotated[float, Range(above=0, most=1)] = option(
        1.0, "Share of the parameters whose optimizer is on the host, above 0, at most 1."
    )
    optimizer_state: bool = option(False, "Whether the rest of the optimizer leaves the GPU while the engine generates.")
    weights: bool = option(False, "Whether the trainer's weights leave the GPU too, between a weight sync and the end of generation.")
    pin_memory: bool = option(True, "Page-locked host memory for gradients and for what leaves: faster copies, but it cannot be swapped.")


class CpuAdam(Moving):
    """An ``OffloadStrategy`` that builds another optimizer. What of it is on the host never moves."""

    def __init__(self, options: CpuAdamOptions) -> None:
        super().__init__(state=options.optimizer_state, weights=options.weights, is_pinned=options.pin_memory)
        self._fraction = options.fraction

    def configure_optimizer(self, spec: OptimizerSpec) -> OptimizerSpec:
        """Puts the fraction on the host; the optimizer then holds the fp32 main weights itself.

        Raises:
            ConfigError: fp32 training, which Megatron's hybrid optimizer does not build for.
        """
        _check_precision(is_bf16=spec.arguments["bf16"])
        offload = {
            "optimizer_cpu_offload": True,
            "optimizer_offload_fraction": self._fraction,
            "overlap_cpu_optimizer_d2h_h2d": True,
            "pin_cpu_grads": self._is_pinned,
            "use_precision_aware_optimizer": True,
        }
        return replace(spec, arguments={**spec.arguments, **offload})


def memory(options: CpuAdamOptions, precision: str) -> OffloadMemory:
    """See ``OffloadSpec``; raises ConfigError for fp32 training."""
    _check_precision(is_bf16=precision == "bf16")
    return OffloadMemory(
        releases_gradients=True,
        hosted_share=options.fraction,
        hosted_bytes=HOST_BYTES,
        moves_state=options.optimizer_state,
        moves_weights=options.weights,
    )


def _check_precision(*, is_bf16: bool) -> None:
    if not is_bf16:
        raise ConfigError("offload=cpu_adam: needs train.precision=bf16, is fp32. Set train.precision=bf16, or another offload.")


@hookimpl
def rlbatch_register_offload_strategies() -> Mapping[str, OffloadSpec]:
    """Supplies ``cpu_adam``."""
    return {"cpu_adam": OffloadSpec(CpuAdam, CpuAdamOptions, needs_gpu=True, memory=memory, advised=({}, {"weights": True}))}
