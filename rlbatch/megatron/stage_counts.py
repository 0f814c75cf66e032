"""Counts the parameters that Megatron itself builds for each pipeline stage, to verify a plan's counts."""

from __future__ import annotations

from dataclasses import replace

from rlbatch.api import ModelFamily
from rlbatch.config.schema import LayoutConfig
from rlbatch.megatron.simulated_rank import on_meta, simulated_rank, stages


def stage_counts(family: ModelFamily, layout: LayoutConfig) -> list[tuple[int, int]]:
    """Number of parameters on the first rank of each stage, in all and in routed experts, from a model on the meta device."""
    layout = replace(layout, dispatcher="alltoall", deepep=False)  # DeepEP has no parameters, and need not be installed here
    size, found = layout.world_size // layout.pp_size, []
    for stage in range(layout.pp_size):
        with simulated_rank(layout, stage * size), on_meta():
            parameters = [parameter for chunk in stages(family, layout) for parameter in chunk.parameters()]
            experts = sum(parameter.numel() for parameter in parameters if not getattr(parameter, "allreduce", True))
            found.append((sum(parameter.numel() for parameter in parameters), experts))
    return found
