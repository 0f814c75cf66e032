"""Searches the layouts of a model on so many GPUs: those that fit, the fastest first.

The space: tensor, pipeline (also with uneven ends, and interleaved), context, expert and expert tensor parallel sizes, recomputation,
offload strategies with their default options, tokens of a pack. Candidates are looked at in the order of a time that none of them can beat:
the ten that are returned are the fastest of the whole space that fit, as each of the others is slower by its bound already.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import count, product
from typing import Any

from rlbatch.api import ConfigError, OffloadMemory, RlbatchError
from rlbatch.config.schema import Config, LayoutConfig
from rlbatch.plan.advice import RECOMPUTE, Change
from rlbatch.plan.engine_plan import EnginePlan
from rlbatch.plan.fit import changed, layout_changes, may_fit, offloads
from rlbatch.plan.generation import generation
from rlbatch.plan.job_plan import JobPlan, changed_plan, gpu_of
from rlbatch.plan.layout import check_layout, stage_ends
from rlbatch.plan.nodes import place_ranks
from rlbatch.plan.step_time import step_time
from rlbatch.plan.workload import workload
from rlbatch.registry import Registry

BEST = 10
INTERLEAVED = (1, 2, 4)
CONTEXTS = (1, 2, 4, 8)
PACKS = (1, 2, 4)
"""Times the longest sample's tokens of a rank."""
RECOMPUTED: tuple[Mapping[str, Any], ...] = (dict.fromkeys(RECOMPUTE), RECOMPUTE)
NODES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""Tried as the smallest cluster."""


@dataclass(frozen=True)
class Candidate:
    """A layout with its recomputation and packs, and the time below which a step cannot be, whatever is offloaded."""

    config: Config
    bound: float


def best_layouts(plan: JobPlan, registry: Registry, most: int = BEST) -> list[Change]:
    """The fastest jobs that fit on as many GPUs, the fastest first; changes are to the plan's own.

    Args:
        plan: What its GPUs can do is known.
        registry: Plugins.
        most: How many are looked for.
    """
    ways = [changed(plan.job.config, keys, registry) for keys in ({}, *offloads(plan.job, registry))]
    number = count()
    queue: list[tuple[float, int, Candidate | JobPlan]] = [(each.bound, next(number), each) for each in candidates(plan)]
    heapq.heapify(queue)
    found: list[Change] = []
    while queue and len(found) < most:
        _, _, first = heapq.heappop(queue)
        if isinstance(first, JobPlan):
            found.append(Change(config_changes(plan.job.config, first.job.config), first))
            continue
        for way in ways:
            exact = _fitting(plan, replace(way, layout=first.config.layout, train=first.config.train), registry)
            if exact and exact.time:
                heapq.heappush(queue, (exact.time.seconds, next(number), exact))
    return found


def smallest_cluster(plan: JobPlan, registry: Registry) -> tuple[int, list[Change]]:
    """The fewest GPUs, in whole nodes, on which a job fits, and the fastest jobs there; 0: none of those tried."""
    per_node = plan.job.config.cluster.gpus_per_node
    for world in (nodes * per_node for nodes in NODES):
        layout = replace(plan.job.config.layout, world_size=world)
        cluster = replace(plan.job.config.cluster, gpus=world)
        config = replace(plan.job.config, layout=layout, cluster=cluster)
        if found := best_layouts(replace(plan, job=replace(plan.job, config=config)), registry):
            return world, [Change({"layout.world_size": world, **change.keys}, change.plan) for change in found]
    return 0, []


def candidates(plan: JobPlan) -> Iterator[Candidate]:
    """All of the space whose weights and gradients have room."""
    for layout, recompute in product(all_layouts(plan), RECOMPUTED):
        sized = replace(layout, **{key.removeprefix("layout."): value for key, value in recompute.items()})
        if may_fit(plan.job, sized):
            least = -(-plan.work.longest // layout.cp_size)
            for tokens in sorted({least * times for times in PACKS} | {max(plan.job.config.train.max_tokens_per_gpu, least)}):
                train = replace(plan.job.config.train, max_tokens_per_gpu=tokens)
                config = replace(plan.job.config, layout=sized, train=train)
                yield Candidate(config, _bound(plan, config))


def all_layouts(plan: JobPlan) -> Iterator[LayoutConfig]:
    """Layouts of as many ranks that are accepted."""
    own, family, node = plan.job.config.layout, plan.model.family, plan.job.config.cluster.gpus_per_node
    world, base = own.world_size, replace(own, first_stage_layers=None, last_stage_layers=None, vpp_size=1)
    tensor = [size for size in _divisors(world) if size <= node]
    experts = [size for size in _divisors(world) if family.num_experts and family.num_experts % size == 0] or [1]
    stages = [size for size in _divisors(world) if size <= family.num_layers]
    for tp, pp, cp, ep in product(tensor, stages, CONTEXTS, experts):
        if world % (tp * pp * cp) or world % (pp * ep):
            continue
        for etp in {1, tp} if family.num_experts else {1}:
            ends = [(None, None)] if pp == 1 or family.num_layers % pp == 0 else [stage_ends(pp, family.num_layers) or (None, None)]
            for (first, last), vpp in product(ends, INTERLEAVED if pp > 1 and family.num_layers % pp == 0 else (1,)):
                sizes = {"tp_size": tp, "pp_size": pp, "cp_size": cp, "ep_size": ep, "etp_size": etp, "vpp_size": vpp}
                layout = replace(base, first_stage_layers=first, last_stage_layers=last, **sizes)
                try:
                    check_layout(layout, family, on_gpu=plan.job.on_gpu)
                except ConfigError:
                    continue
                yield layout


def config_changes(before: Config, after: Config) -> dict[str, Any]:
    """The keys in which a candidate differs."""
    keys = dict(layout_changes(before.layout, after.layout))
    if before.train.max_tokens_per_gpu != after.train.max_tokens_per_gpu:
        keys["train.max_tokens_per_gpu"] = after.train.max_tokens_per_gpu
    if before.offload != after.offload:
        keys["offload"] = after.offload.name
        keys |= {f"offload.options.{name}": value for name, value in after.offload.options.items()}
    return keys


def _bound(plan: JobPlan, config: Config) -> float:
    """Seconds of a step whose engines have room for all samples at once, and whose optimizer stays on the GPU."""
    gpu, work = gpu_of(config), workload(config)
    assert gpu is not None
    job = replace(plan.job, config=config, offload=OffloadMemory())
    endless = replace(plan.cache, tokens=0)
    generated = generation(job, plan.model, work, endless, gpu, plan.nodes[0])
    return step_time(job, plan.model, work, generated, gpu, plan.nodes[0]).seconds


def _fitting(plan: JobPlan, config: Config, registry: Registry) -> JobPlan | None:
    """The plan of a job of the space; None: it does not fit."""
    try:
        where = place_ranks(config, registry)
        after = changed_plan(plan, config, registry, (where.ranks_per_node,) * where.nodes)
        engines = EnginePlan(config, registry, after.job.gpus, after.job.shape, where)
        engines.check_nodes()
        engines.check_separate_gpus()
        engines.check_memory(after.job)
    except RlbatchError:
        return None
    return after if after.verdict == "fits" else None


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]
