"""Lists the engines that a job could have in place of its own, by their GPUs and data-parallel replicas."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

from rlbatch.api import ConfigError
from rlbatch.config.divisors import divisors
from rlbatch.plan.advice import engine_shares
from rlbatch.plan.engine_memory import MemoryInputs, changed_inputs, engine_memory
from rlbatch.plan.engine_plan import EnginePlan
from rlbatch.plan.fit import changed, offloads
from rlbatch.plan.generation import Cache, Generation, generation, replica_cache
from rlbatch.plan.job_plan import JobPlan, gpu_of
from rlbatch.plan.nodes import place_ranks
from rlbatch.plan.step_time import least_sync
from rlbatch.registry import Registry

MOST_GPUS = 64
"""Largest number of GPUs of an engine that is tried in place of the job's own; larger engines are not known well enough."""


def engine_keys(job: MemoryInputs, registry: Registry) -> Iterator[Mapping[str, Any]]:
    """Changes of keys that give the job other engines, beginning with none, the job's own. Engines on GPUs of their own are not changed."""
    config, spec, shape = job.config, registry.rollout(job.config), job.shape
    yield {}
    if not (spec.ranks_option and shape.is_colocated and job.model):
        return
    place, has_experts = place_ranks(config, registry), bool(job.model.family.num_experts)
    copies = spec.over_nodes if has_experts else None  # which divide the experts among them
    for gpus in EnginePlan(config, registry, job.gpus, shape, place).sizes(spans_nodes=copies is not None):
        for replicas in divisors(gpus):
            if gpus > MOST_GPUS or gpus // replicas > place.ranks_per_node or (gpus, replicas) == (job.gpus, shape.replicas):
                continue
            if replicas > 1 and copies is None:
                break
            said = copies(replicas) if copies else {shape.replicas_option: 1} if shape.replicas > 1 else {}
            options = {f"rollout.engine.{name}": value for name, value in said.items() if config.rollout.engine.get(name) != value}
            yield {f"rollout.options.{spec.ranks_option}": gpus, **options}


class Engines:
    """Engines of one shape, combined with any offload strategy of the trainer and any share of a GPU.

    Args:
        plan: Plan of the job whose engines these may replace.
        keys: Config keys and values that make these engines.
        registry: Plugins of the job.

    Raises:
        RlbatchError: the engines are invalid, do not suit this model, or do not fit a GPU.
    """

    def __init__(self, plan: JobPlan, keys: Mapping[str, Any], registry: Registry) -> None:
        """Counts the least time that a step takes with these engines."""
        self._plan, self._keys, self._registry, own = plan, keys, registry, plan.job
        self._jobs: dict[tuple[int, int], MemoryInputs] = {}
        self._generated: dict[Cache, Generation] = {}
        job = changed_inputs(own, changed(own.config, keys, registry), registry) if keys else own
        gpu, node = gpu_of(job.config), plan.nodes[0]
        assert gpu is not None
        place = place_ranks(job.config, registry)
        engine = EnginePlan(job.config, registry, job.gpus, job.shape, place)
        engine.check_nodes()
        engine.check_separate_gpus()
        engine.check_experts(plan.model.family)
        engine.check_heads(plan.model.family, on_gpu=job.on_gpu)
        if engine_memory(job).total > job.config.cluster.gpu_memory_gib:
            raise ConfigError(f"rollout={job.config.rollout.name}: its engines do not fit a GPU. Use larger ones.")
        shares = engine_shares(job)
        largest = changed_inputs(own, changed(job.config, shares[max(shares)], registry), registry)
        cache = replica_cache(largest, plan.model, plan.work, trainer=0.0)
        self.least = generation(largest, plan.model, plan.work, cache, gpu, node).seconds + least_sync(job)
        """Seconds of generation and weight sync with the largest share of a GPU, which no job with these engines can undercut."""

    @cached_property
    def _offloaded(self) -> list[Mapping[str, Any]]:
        return [{}, *offloads(self._plan.job, self._registry)]

    @cached_property
    def _shares(self) -> list[Mapping[str, Any]]:
        return list(engine_shares(self._plan.job).values())

    @property
    def ways(self) -> range:
        """Indices of the offload strategies; 0 is the job's own."""
        return range(len(self._offloaded))

    @property
    def shares(self) -> int:
        """Number of shares of a GPU that are tried."""
        return len(self._shares)

    def job(self, way: int, share: int) -> MemoryInputs:
        """The job with offload strategy number ``way`` and GPU share number ``share`` (0: the largest), in the layout of the plan."""
        if (way, share) not in self._jobs:
            keys = {**self._keys, **self._offloaded[way], **self._shares[share]}
            self._jobs[way, share] = changed_inputs(self._plan.job, changed(self._plan.job.config, keys, self._registry), self._registry)
        return self._jobs[way, share]

    def generated(self, job: MemoryInputs) -> Generation:
        """The generation of a step by one of these engines' jobs; its layout does not matter."""
        cache = replica_cache(job, self._plan.model, self._plan.work)
        if cache not in self._generated:
            gpu = gpu_of(job.config)
            assert gpu is not None
            self._generated[cache] = generation(job, self._plan.model, self._plan.work, cache, gpu, self._plan.nodes[0])
        return self._generated[cache]
