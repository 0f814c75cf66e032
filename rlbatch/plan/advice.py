"""Finds the cheapest changes of a job with which it fits, each with the memory and step time that follow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import combinations, islice
from typing import Any

from rlbatch.api import RlbatchError
from rlbatch.config.structured import show_value
from rlbatch.plan.engine_memory import MemoryInputs, changed_inputs
from rlbatch.plan.engine_plan import EnginePlan
from rlbatch.plan.fit import changed, layout_changes, layouts, may_fit, spare
from rlbatch.plan.job_plan import JobPlan, plan_job
from rlbatch.plan.nodes import place_ranks
from rlbatch.registry import Registry

MOST_LAYOUTS = 60
SHOWN = 3
RECOMPUTE = {"layout.recompute_granularity": "full", "layout.recompute_method": "uniform", "layout.recompute_num_layers": 1}
SHARES = (0.85, 0.7, 0.55, 0.4)
"""Shares of a GPU that are tried for an engine in place of its own."""


@dataclass(frozen=True)
class Change:
    """A change of some config keys with which a job fits.

    Attributes:
        keys: Config key -> new value.
        plan: Plan of the changed job.
    """

    keys: Mapping[str, Any]
    plan: JobPlan

    def __str__(self) -> str:
        return " ".join(f"{key}={show_value(value)}" for key, value in self.keys.items())


def cheapest_changes(plan: JobPlan, registry: Registry) -> list[Change]:
    """The cheapest changes with which the job fits, the fastest first, at most ``SHOWN``.

    Changes of one key come before changes of two, and these before other layouts. Only those on the fewest GPUs are returned.
    """
    for group in (_single(plan, registry), _pairs(plan, registry), _layouts(plan)):
        found = [change for keys in group if (change := _change(plan, keys, registry))]
        if found:
            least = min(change.plan.job.config.layout.world_size for change in found)
            own = [change for change in found if change.plan.job.config.layout.world_size == least]
            return sorted(own, key=lambda change: (_seconds(change.plan), len(change.keys)))[:SHOWN]
    return []


def _seconds(plan: JobPlan) -> float:
    return plan.time.seconds if plan.time else 0.0


def cheapest_relief(plan: JobPlan, registry: Registry, phase: str, gib: float, *, on_host: bool = False) -> Change | None:
    """The fastest change of one key with which the fullest GPU takes ``gib`` less in a phase and the job may fit; None if there is none.

    With ``on_host`` the host memory of the fullest node has to take that much less. The job may have fit its plan before.
    """

    def most(of: JobPlan) -> float:
        if on_host:
            return of.memory.host(of.nodes, phase)[0].gib
        return max(of.memory.gpu_of_stage(stage, phase)[0].gib for stage in range(len(of.memory.expected.stages)))

    changes = ((keys, _changed(plan, keys, registry)) for keys in _single(plan, registry))
    found = [Change(keys, after) for keys, after in changes if after and after.verdict != "does not fit" and most(after) < most(plan) - gib]
    return min(found, key=lambda change: (_seconds(change.plan), len(change.keys)), default=None)


def _change(plan: JobPlan, keys: Mapping[str, Any], registry: Registry) -> Change | None:
    """The change with its plan, or None if the changed job does not fit."""
    after = _changed(plan, keys, registry)
    return Change(keys, after) if after and after.has_room else None


def _changed(plan: JobPlan, keys: Mapping[str, Any], registry: Registry) -> JobPlan | None:
    """The plan of the changed job, or None if its options are invalid or its engines have no room."""
    try:
        job = changed_inputs(plan.job, changed(plan.job.config, keys, registry), registry)
        nodes = engine_nodes(job, registry)
    except RlbatchError:
        return None
    return plan_job(job, nodes)


def engine_nodes(job: MemoryInputs, registry: Registry) -> tuple[int, ...]:
    """The number of ranks of each node; raises RlbatchError if the job's engines have no place on these nodes."""
    where = place_ranks(job.config, registry)
    EnginePlan(job.config, registry, job.gpus, job.shape, where).check_place(job)
    return (where.ranks_per_node,) * where.nodes


def _single(plan: JobPlan, registry: Registry) -> list[Mapping[str, Any]]:
    """Candidates for changes that keep the layout's sizes, each a mapping of config keys to values."""
    job, config = plan.job, plan.job.config
    found: list[Mapping[str, Any]] = [each for each in spare(job, registry) if each]
    if config.layout.recompute_granularity != "full":
        parts = ("recompute_modules", "offload_modules")
        found.append(RECOMPUTE | {f"layout.{name}": () for name in parts if getattr(config.layout, name)})
    least, tokens = -(-plan.work.longest // config.layout.cp_size), config.train.pack_tokens
    found += [{"train.max_tokens_per_gpu": max(tokens // part, least)} for part in (2, 4) if least < tokens]
    return found + [keys for share, keys in engine_shares(job).items() if share < job.shape.memory_share]


def engine_shares(job: MemoryInputs) -> dict[float, Mapping[str, Any]]:
    """Shares of a GPU that the job's engines could take, the largest first -> keys that set them; the present share has no keys."""
    own, option = job.shape.memory_share, job.shape.memory_option
    others = {share: {f"rollout.engine.{option}": share} for share in SHARES} if option and own < 1 else {}
    return dict(sorted({**others, own: {}}.items(), reverse=True))


def _pairs(plan: JobPlan, registry: Registry) -> Iterator[Mapping[str, Any]]:
    for first, second in combinations(_single(plan, registry), 2):
        if not set(first) & set(second):
            yield {**first, **second}


def _layouts(plan: JobPlan) -> Iterator[Mapping[str, Any]]:
    for layout in islice(filter(partial(may_fit, plan.job), layouts(plan.job)), MOST_LAYOUTS):
        if keys := layout_changes(plan.job.config.layout, layout):
            yield keys
