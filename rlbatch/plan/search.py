"""Searches the layouts of a model on a number of GPUs for those that fit and are fastest.

The space: tensor, pipeline (also with uneven ends, and interleaved), context, expert and expert tensor parallel sizes; recomputation;
offload strategies with the options that they advise; tokens of a pack; an engine's GPUs, replicas and share of a GPU; and the job's own
settings. Candidates are examined in the order of a lower bound of their step time. The search stops after ten that fit: these are the
fastest of the whole space, since the bound of every other candidate is already higher.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, product
from typing import Any, NamedTuple

from rlbatch.api import ConfigError, OffloadMemory, RlbatchError
from rlbatch.config.divisors import divisors
from rlbatch.config.schema import Config, LayoutConfig, TrainConfig
from rlbatch.plan.advice import RECOMPUTE, Change
from rlbatch.plan.engine_memory import MemoryInputs, changed_inputs
from rlbatch.plan.engine_plan import EnginePlan
from rlbatch.plan.engine_shapes import Engines, engine_keys
from rlbatch.plan.fit import changed, layout_changes, may_fit, without_engines
from rlbatch.plan.generation import Generation
from rlbatch.plan.job_plan import JobPlan, gpu_of, has_room, may_have_room, plan_job
from rlbatch.plan.layout import check_layout, stage_ends
from rlbatch.plan.memory import trainer_gib
from rlbatch.plan.nodes import place_ranks
from rlbatch.plan.step_time import arriving_seconds, moving_seconds, offload_seconds, step_time
from rlbatch.registry import Registry

BEST = 10
DIGITS = 9
"""Digits after the decimal point of a step's seconds; steps with equal digits count as equally long."""
NOTHING = Generation(0.0, 0.0, 0.0)
INTERLEAVED = (1, 2, 4)
CONTEXTS = (1, 2, 4, 8)
PACKS = (1, 2, 4)
"""Pack sizes that are tried, as multiples of a rank's tokens of the longest sample."""
_REMADE = {key.removeprefix("layout."): value for key, value in RECOMPUTE.items()}
RECOMPUTED: tuple[dict[str, Any], ...] = tuple(
    {**keys, "recompute_modules": (), "offload_modules": ()} for keys in (dict.fromkeys(_REMADE), _REMADE)
)
"""Settings of recomputation that are tried: none, and of all layers."""
NODES = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""Numbers of nodes that are tried for the smallest cluster, after parts of one node and a whole one."""


@dataclass(frozen=True)
class Candidate:
    """A layout with recomputation and a pack size.

    Attributes:
        config: The job's config with this layout and pack size.
        plain: The layout without recomputation.
        number: Index of ``plain``, which several candidates share, as a key of caches.
        bound: Least time of the trainer's part of a step with any offload strategy, seconds.
        keys: Number of config keys in which the candidate differs from the job.
    """

    config: Config
    plain: LayoutConfig
    number: int
    bound: float
    keys: int


def best_layouts(plan: JobPlan, registry: Registry, most: int = BEST) -> list[Change]:
    """Finds the jobs on as many GPUs that fit, the fastest first, as changes of the plan's job.

    Of jobs that take equally long, only the one that differs in the fewest keys is returned.

    Args:
        plan: Plan of a job on GPUs whose rates are known.
        registry: Plugins of the job.
        most: Largest number of jobs to find.
    """
    number, engines = count(), other_engines(plan, registry)
    clock, room = _Clock(plan, engines), _Room(plan, registry, engines)
    queue: list[tuple[float, int, int, _Next]] = []

    def put(seconds: float, each: _Next, keys: int = 0) -> None:
        heapq.heappush(queue, (seconds, keys, next(number), each))

    for candidate in candidates(plan) if engines else ():
        put(candidate.bound + engines[0].least, _Next(candidate, 0))
    found: dict[float, Change] = {}
    while queue and len(found) < most:
        seconds, _, _, each = heapq.heappop(queue)
        candidate, own = each.candidate, engines[each.place]
        following = [each.after()]
        if each.way is None:
            following = [_Next(candidate, each.place, way) for way in own.ways]
            if each.place + 1 < len(engines):  # those that generate no faster come later
                put(candidate.bound + engines[each.place + 1].least, _Next(candidate, each.place + 1))
        elif not room.has_trainer(each):  # asked only of what is fast enough to matter
            continue
        elif round(seconds, DIGITS) not in found:
            job = each.job(own) if room.has(each) else None
            exact = plan_job(job, plan.nodes) if job and has_room(job, plan.nodes) else None
            if job and exact and exact.time:
                found[round(seconds, DIGITS)] = Change(config_changes(plan.job.config, job.config), exact)
                if job.shape.memory_share <= plan.job.shape.memory_share:
                    continue  # with less memory an engine is no faster
        for after in following:
            if after.share < own.shares:
                put(clock.seconds(after), after, clock.changed_keys(after))
    return list(found.values())


class _Clock:
    """Estimates the step times of jobs, whether or not they fit. A part of the time is computed once for all jobs that share its inputs."""

    def __init__(self, plan: JobPlan, engines: Sequence[Engines]) -> None:
        self._plan, self._engines = plan, engines
        self._of_layouts: dict[tuple[int, int], tuple[float, float]] = {}
        self._arriving: dict[tuple[int, int, int, int], float] = {}
        self._generated: dict[tuple[int, int, int, int], float] = {}
        self._keys: dict[tuple[int, int, int], int] = {}

    def seconds(self, each: _Next) -> float:
        """Seconds of a step of the job."""
        candidate, engines, way = each.candidate, self._engines[each.place], each.way or 0
        node, plain = self._plan.nodes[0], engines.job(way, each.share)
        if (key := (way, candidate.number)) not in self._of_layouts:
            job, gpu = each.job(engines), gpu_of(plain.config)
            assert gpu is not None
            self._of_layouts[key] = offload_seconds(job, self._plan.model, gpu, node), moving_seconds(job, self._plan.model)
        shape = (each.place, way, each.share)
        if (arriving := (*shape, candidate.plain.pp_size)) not in self._arriving:
            self._arriving[arriving] = arriving_seconds(each.job(engines), node)
        if (generated := (*shape, candidate.number if plain.shape.is_share_of_free else -1)) not in self._generated:
            self._generated[generated] = engines.generated(each.job(engines)).seconds
        added, moving = self._of_layouts[key]
        sync = plain.config.plan.assume.sync_factor * (self._arriving[arriving] + moving)
        return candidate.bound + added + self._generated[generated] + sync

    def changed_keys(self, each: _Next) -> int:
        """Number of config keys in which the job differs from the plan's."""
        if (key := (each.place, each.way or 0, each.share)) not in self._keys:
            job = self._engines[each.place].job(each.way or 0, each.share)
            self._keys[key] = len(engine_changes(self._plan.job.config, job.config))
        return each.candidate.keys + self._keys[key]


class _Next(NamedTuple):
    """The next entry of the search: a candidate with engines or, if ``way`` and ``share`` are set, a whole job."""

    candidate: Candidate
    place: int
    way: int | None = None
    share: int = 0

    def after(self) -> _Next:
        """The same entry with the next smaller share of the GPU for its engines."""
        return _Next(self.candidate, self.place, self.way, self.share + 1)

    def job(self, engines: Engines) -> MemoryInputs:
        """The job in the layout of the candidate."""
        return _with(engines.job(self.way or 0, self.share), self.candidate.config.layout, self.candidate.config.train)

    def plain_job(self, engines: Engines) -> MemoryInputs:
        """The job in the layout of the candidate without recomputation."""
        return _with(engines.job(self.way or 0, self.share), self.candidate.plain, self.candidate.config.train)


def other_engines(plan: JobPlan, registry: Registry) -> list[Engines]:
    """Engines that the job could have, with its own, the fastest first."""
    found = []
    for keys in engine_keys(plan.job, registry):
        with suppress(RlbatchError):
            found.append(Engines(plan, keys, registry))
    return sorted(found, key=lambda engines: engines.least)


class _Room:
    """Decides which jobs may fit. Each layout is examined once, first without engines."""

    def __init__(self, plan: JobPlan, registry: Registry, engines: Sequence[Engines]) -> None:
        self._nodes, self._place, self._registry, self._engines = plan.nodes, place_ranks(plan.job.config, registry), registry, engines
        self._trainers: dict[tuple[int, int], bool] = {}
        self._beside: dict[tuple[int, int], float] = {}
        self._plans: dict[tuple[int, int, int], EnginePlan] = {}
        self._known: dict[tuple[int, int, int, int], bool] = {}

    def has(self, each: _Next) -> bool:
        """Whether the job may fit with some recomputation and packs."""
        way, number, engines = each.way or 0, each.candidate.number, self._engines[each.place]
        if (key := (each.place, way, each.share, number)) not in self._known:
            plain, shape = engines.job(way, each.share), key[:3]
            if shape not in self._plans:
                self._plans[shape] = EnginePlan(plain.config, self._registry, plain.gpus, plain.shape, self._place)
            if (way, number) not in self._beside:
                self._beside[way, number] = trainer_gib(each.plain_job(engines))
            has_memory = self._plans[shape].has_memory(plain, self._beside[way, number])
            self._known[key] = has_memory and may_have_room(each.plain_job(engines), self._nodes)
        return self._known[key]

    def has_trainer(self, each: _Next) -> bool:
        """Whether the job may fit without its engines."""
        if (key := (each.way or 0, each.candidate.number)) not in self._trainers:
            job = each.plain_job(self._engines[each.place])
            self._trainers[key] = may_have_room(without_engines(job), self._nodes)
        return self._trainers[key]


def smallest_cluster(plan: JobPlan, registry: Registry) -> tuple[int, list[Change]]:
    """The fewest GPUs of those tried on which the job fits, and the fastest jobs there; 0 and no jobs if it fits on none."""
    cluster = plan.job.config.cluster
    for world in (*divisors(cluster.gpus_per_node), *(nodes * cluster.gpus_per_node for nodes in NODES)):
        sized = {"layout.world_size": world, **({"cluster.gpus": world} if 0 < cluster.gpus < world else {})}
        for keys in (sized, sized | _least_engines(plan.job, registry)):
            with suppress(RlbatchError):  # its own engines cannot be on so many
                config = changed(plan.job.config, keys, registry)
                where, job = place_ranks(config, registry), changed_inputs(plan.job, config, registry)
                if found := best_layouts(replace(plan, job=job, nodes=(where.ranks_per_node,) * where.nodes), registry):
                    return world, [Change({**keys, **change.keys}, change.plan) for change in found]
                break
    return 0, []


def _least_engines(job: MemoryInputs, registry: Registry) -> dict[str, Any]:
    """Config keys for engines of one GPU."""
    option, copies = registry.rollout(job.config).ranks_option, job.shape.replicas_option if job.shape.replicas > 1 else ""
    return {**({f"rollout.options.{option}": 1} if option else {}), **({f"rollout.engine.{copies}": 1} if copies else {})}


def candidates(plan: JobPlan) -> Iterator[Candidate]:
    """Yields all candidates whose weights and gradients fit a GPU, each with a lower bound of its step time.

    The bound is the time with an optimizer that stays on the GPU, which no offload strategy beats.
    """
    job, gpu = replace(plan.job, offload=OffloadMemory()), gpu_of(plan.job.config)
    own, node = job.config, plan.nodes[0]
    assert gpu is not None
    layouts = (replace(layout, **keys) for layout, keys in product(all_layouts(plan), RECOMPUTED))
    numbers: dict[LayoutConfig, int] = {}
    for layout in filter(partial(may_fit, job), dict.fromkeys((own.layout, *layouts))):
        least, plain = -(-plan.work.longest // layout.cp_size), replace(layout, **RECOMPUTED[0])
        number = numbers.setdefault(plain, len(numbers))
        for tokens in {own.train.pack_tokens, *(least * times for times in PACKS)}:
            config = replace(own, layout=layout, train=replace(own.train, max_tokens_per_gpu=tokens))
            time = step_time(replace(job, config=config), plan.model, plan.work, NOTHING, gpu, node)
            yield Candidate(config, plain, number, time.seconds - time.phases["sync"], len(trainer_changes(own, config)))


def all_layouts(plan: JobPlan) -> Iterator[LayoutConfig]:
    """Yields the valid layouts with as many ranks as the job."""
    own, family, node = plan.job.config.layout, plan.model.family, plan.job.config.cluster.gpus_per_node
    world, layers, own_ends = own.world_size, family.num_layers, {own.pp_size: (own.first_stage_layers, own.last_stage_layers)}
    tensor = [size for size in divisors(world) if size <= node]
    experts = [size for size in divisors(world) if family.num_experts and family.num_experts % size == 0] or [1]
    stages = [size for size in divisors(world) if size <= layers]
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
    """Config keys in which ``after`` differs from ``before``, with the values of ``after``."""
    return {**trainer_changes(before, after), **engine_changes(before, after)}


def trainer_changes(before: Config, after: Config) -> dict[str, Any]:
    """Changes of the layout's and packs' keys from ``before`` to ``after``."""
    keys = dict(layout_changes(before.layout, after.layout))
    if before.train.max_tokens_per_gpu != after.train.max_tokens_per_gpu:
        keys["train.max_tokens_per_gpu"] = after.train.pack_tokens
    return keys


def engine_changes(before: Config, after: Config) -> dict[str, Any]:
    """Changes of the engines' and the offload strategy's keys from ``before`` to ``after``."""
    keys: dict[str, Any] = {}
    if before.offload != after.offload:
        keys["offload"] = after.offload.name
        keys |= {f"offload.options.{name}": value for name, value in after.offload.options.items()}
    for group, own, other in (
        ("options", before.rollout.options, after.rollout.options),
        ("engine", before.rollout.engine, after.rollout.engine),
    ):
        keys |= {f"rollout.{group}.{name}": value for name, value in other.items() if value != own.get(name)}
    return keys


def _with(job: MemoryInputs, layout: LayoutConfig, train: TrainConfig) -> MemoryInputs:
    return replace(job, config=replace(job.config, layout=layout, train=train))
