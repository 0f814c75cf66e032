"""Searches the layouts of a model on so many GPUs: those that fit, the fastest first.

The space: tensor, pipeline (also with uneven ends, and interleaved), context, expert and expert tensor parallel sizes, recomputation,
offload strategies with their default options, tokens of a pack, an engine's share of a GPU; and the job's own. Candidates are looked at
in the order of a time that none of them can beat: the ten that are returned are the fastest of the whole space that fit, as each of the
others is slower by its bound already.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import count, product
from typing import Any

from rlbatch.api import ConfigError, OffloadMemory, RlbatchError
from rlbatch.config.schema import Config, LayoutConfig, TrainConfig
from rlbatch.plan.advice import RECOMPUTE, Change, engine_nodes, engine_shares
from rlbatch.plan.engine_memory import MemoryInputs, changed_inputs, engine_memory
from rlbatch.plan.fit import changed, layout_changes, may_fit, offloads
from rlbatch.plan.generation import Cache, generation, samples_at_once
from rlbatch.plan.job_plan import JobPlan, gpu_of, may_have_room, plan_job
from rlbatch.plan.layout import check_layout, stage_ends
from rlbatch.plan.nodes import place_ranks
from rlbatch.plan.step_time import step_time
from rlbatch.registry import Registry

BEST = 10
INTERLEAVED = (1, 2, 4)
CONTEXTS = (1, 2, 4, 8)
PACKS = (1, 2, 4)
"""Times the longest sample's tokens of a rank."""
_REMADE = {key.removeprefix("layout."): value for key, value in RECOMPUTE.items()}
RECOMPUTED: tuple[dict[str, Any], ...] = (dict.fromkeys(_REMADE), _REMADE)
"""Nothing, and all."""
NODES = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""Tried as the smallest cluster, after parts of one node and a whole one."""


@dataclass(frozen=True)
class Candidate:
    """A layout with its recomputation and packs, and the time below which a step cannot be, whatever is offloaded."""

    config: Config
    bound: float


def best_layouts(plan: JobPlan, registry: Registry, most: int = BEST) -> list[Change]:
    """The fastest jobs that fit on as many GPUs, the fastest first; changes are to the plan's own. Of those that take equally long, the one
    that differs in the fewest keys.

    Args:
        plan: What its GPUs can do is known.
        registry: Plugins.
        most: How many are looked for.
    """
    own, number = plan.job.config, count()
    shares = engine_shares(plan.job).values()
    ways = [
        [changed_inputs(plan.job, changed(own, {**keys, **share}, registry), registry) for share in shares]
        for keys in ({}, *offloads(plan.job, registry))
    ]

    @cache
    def nodes_of(way: int, share: int, layout: LayoutConfig) -> tuple[int, ...]:
        """Empty: whatever the recomputation and packs, it does not fit."""
        job = _with(ways[way][share], layout, own.train)
        with suppress(RlbatchError):
            nodes = engine_nodes(job, registry)
            return nodes if may_have_room(job, nodes) else ()
        return ()

    queue: list[tuple[float, int, int, Candidate | Change]] = [(each.bound, 0, next(number), each) for each in candidates(plan)]
    heapq.heapify(queue)
    found: dict[float, Change] = {}
    while queue and len(found) < most:
        seconds, _, _, first = heapq.heappop(queue)
        if isinstance(first, Change):
            found.setdefault(seconds, first)
            continue
        for way, engines in enumerate(ways):
            for share, job in enumerate(engines):
                nodes = nodes_of(way, share, replace(first.config.layout, **RECOMPUTED[0]))
                exact = plan_job(_with(job, first.config.layout, first.config.train), nodes) if nodes else None
                if exact and exact.has_room and exact.time:
                    keys = config_changes(own, exact.job.config)
                    heapq.heappush(queue, (exact.time.seconds, len(keys), next(number), Change(keys, exact)))
                    if job.shape.memory_share <= plan.job.shape.memory_share:
                        break  # with less memory an engine is no faster
    return list(found.values())


def smallest_cluster(plan: JobPlan, registry: Registry) -> tuple[int, list[Change]]:
    """The fewest GPUs on which a job fits, of a node's or of whole nodes, and the fastest jobs there; 0: none of those tried."""
    cluster = plan.job.config.cluster
    if engine_memory(plan.job).total > cluster.gpu_memory_gib:
        return 0, []  # on however many: an engine has as many of them
    for world in (*_divisors(cluster.gpus_per_node), *(nodes * cluster.gpus_per_node for nodes in NODES)):
        sized = {"layout.world_size": world, **({"cluster.gpus": world} if 0 < cluster.gpus < world else {})}
        try:
            config = changed(plan.job.config, sized, registry)
            where, job = place_ranks(config, registry), changed_inputs(plan.job, config, registry)
        except RlbatchError:  # its engines cannot be on so many
            continue
        if found := best_layouts(replace(plan, job=job, nodes=(where.ranks_per_node,) * where.nodes), registry):
            return world, [Change({**sized, **change.keys}, change.plan) for change in found]
    return 0, []


def candidates(plan: JobPlan) -> Iterator[Candidate]:
    """All of the space whose weights and gradients have room.

    A step cannot be faster than one whose engines have room for all samples at once, and whose optimizer stays on the GPU.
    """
    job, gpu = replace(plan.job, offload=OffloadMemory()), gpu_of(plan.job.config)
    own, node = job.config, plan.nodes[0]
    assert gpu is not None
    generated = generation(job, plan.model, plan.work, Cache(0, samples_at_once(job, plan.work), 0, 0), gpu, node)
    layouts = (replace(layout, **keys) for layout, keys in product(all_layouts(plan), RECOMPUTED))
    for layout in filter(partial(may_fit, job), dict.fromkeys((own.layout, *layouts))):
        least = -(-plan.work.longest // layout.cp_size)
        for tokens in {own.train.max_tokens_per_gpu, *(least * times for times in PACKS)}:
            config = replace(own, layout=layout, train=replace(own.train, max_tokens_per_gpu=tokens))
            time = step_time(replace(job, config=config), plan.model, plan.work, generated, gpu, node)
            yield Candidate(config, time.seconds)


def all_layouts(plan: JobPlan) -> Iterator[LayoutConfig]:
    """Layouts of as many ranks that are accepted."""
    own, family, node = plan.job.config.layout, plan.model.family, plan.job.config.cluster.gpus_per_node
    world, layers, own_ends = own.world_size, family.num_layers, {own.pp_size: (own.first_stage_layers, own.last_stage_layers)}
    tensor = [size for size in _divisors(world) if size <= node]
    experts = [size for size in _divisors(world) if family.num_experts and family.num_experts % size == 0] or [1]
    stages = [size for size in _divisors(world) if size <= layers]
    for tp, pp, cp, ep in product(tensor, stages, CONTEXTS, experts):
        if world % (tp * pp * cp) or world % (pp * ep):
            continue
        even = stage_ends(pp, layers) or (None, None)
        ends = dict.fromkeys((even, own_ends.get(pp, even)))
        for etp, (first, last), vpp in product({1, tp} if family.num_experts else {1}, ends, INTERLEAVED):
            sizes = {"tp_size": tp, "pp_size": pp, "cp_size": cp, "ep_size": ep, "etp_size": etp, "vpp_size": vpp}
            layout = replace(own, first_stage_layers=first, last_stage_layers=last, **sizes)
            with suppress(ConfigError):
                check_layout(layout, family, on_gpu=plan.job.on_gpu)
                yield layout


def config_changes(before: Config, after: Config) -> dict[str, Any]:
    """The keys in which a candidate differs."""
    keys = dict(layout_changes(before.layout, after.layout))
    if before.train.max_tokens_per_gpu != after.train.max_tokens_per_gpu:
        keys["train.max_tokens_per_gpu"] = after.train.max_tokens_per_gpu
    if before.offload != after.offload:
        keys["offload"] = after.offload.name
        keys |= {f"offload.options.{name}": value for name, value in after.offload.options.items()}
    engine = after.rollout.engine
    keys |= {f"rollout.engine.{name}": value for name, value in engine.items() if value != before.rollout.engine.get(name)}
    return keys


def _with(job: MemoryInputs, layout: LayoutConfig, train: TrainConfig) -> MemoryInputs:
    return replace(job, config=replace(job.config, layout=layout, train=train))


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]
