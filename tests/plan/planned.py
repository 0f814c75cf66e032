"""Plans of jobs of published models, without a model folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from rlbatch.config.compose import compose
from rlbatch.plan.engine_memory import MemoryInputs, memory_inputs
from rlbatch.plan.job_plan import JobPlan, plan_job
from rlbatch.plan.nodes import place_ranks
from rlbatch.plan.parameters import ModelSize
from rlbatch.registry import load_plugins
from tests.large_models import CONFIGS

REGISTRY = load_plugins()


@cache
def size(model: str) -> ModelSize:
    return ModelSize(REGISTRY.resolve_model_family(CONFIGS[model]))


@cache
def job(*overrides: str) -> MemoryInputs:
    """Of `model=...` or `+cluster=...`; engines in the trainer's precision."""
    config = REGISTRY.complete(compose([*overrides, "rollout.quantization=none", "model.hf=x", "data.train=x"]))
    return replace(memory_inputs(config, REGISTRY, None, on_gpu=True), model=size(config.model.name))


def plan(*overrides: str, **assume: Any) -> JobPlan:
    """With other assumptions."""
    inputs = assuming(job(*overrides), **assume)
    return plan_job(inputs, nodes(inputs))


def assuming(inputs: MemoryInputs, **assume: Any) -> MemoryInputs:
    plan = replace(inputs.config.plan, assume=replace(inputs.config.plan.assume, **assume))
    return replace(inputs, config=replace(inputs.config, plan=plan))


def nodes(inputs: MemoryInputs) -> tuple[int, ...]:
    where = place_ranks(inputs.config, REGISTRY)
    return (where.ranks_per_node,) * where.nodes


def with_layout(inputs: MemoryInputs, sizes: Mapping[str, Any]) -> MemoryInputs:
    return replace(inputs, config=replace(inputs.config, layout=replace(inputs.config.layout, **sizes)))
