"""The plan of a job: everything that is known of it before it is queued, in one object.

``python -m rlbatch.plan`` prints the plan, submit and the dry run show its verdict, and the search compares the plans of many jobs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, product
from typing import Literal

from rlbatch.config.schema import Config
from rlbatch.plan.engine_memory import MemoryInputs
from rlbatch.plan.estimate import MemoryEstimate, estimate_memory
from rlbatch.plan.generation import Cache, Generation, generation, replica_cache
from rlbatch.plan.hardware import Gpu, known_gpu
from rlbatch.plan.memory import PHASES, WHEN, Peak, memory_floor
from rlbatch.plan.parameters import ModelSize
from rlbatch.plan.step_time import StepTime, step_time
from rlbatch.plan.workload import Workload, workload

Verdict = Literal["fits", "not known", "too close", "does not fit"]
ORDER: tuple[Verdict, ...] = ("fits", "not known", "too close", "does not fit")
"""All verdicts, the best first."""
ROOM = ORDER[:2]
"""Verdicts of jobs that fit as far as their sizes are known."""


@dataclass(frozen=True)
class Need:
    """The memory that a GPU or a node needs in its fullest phase, GiB.

    Attributes:
        where: Name of the GPU or node in messages.
        key: Config key that sets the available memory.
        peak: Expected peak.
        spread: Error of the peak, plus or minus.
        certain: The part of the peak that is certainly held.
        has: Available memory; 0 if it is not set.
    """

    where: str
    key: str
    peak: Peak
    spread: float
    certain: float
    has: float

    @property
    def verdict(self) -> Verdict:
        """Whether the peak fits for certain (``fits``), only without its error (``too close``), or not."""
        if not self.has:
            return "not known"
        if max(self.certain, self.peak.gib - self.spread) > self.has:
            return "does not fit"
        return "fits" if self.peak.gib + self.spread <= self.has else "too close"

    @property
    def share(self) -> float:
        """Share of the available memory that the peak takes; 0 if that is not set."""
        return self.peak.gib / self.has if self.has else 0.0

    def __str__(self) -> str:
        has = f" of {self.has:g} ({self.key})" if self.has else ""
        return f"{self.where} {WHEN[self.peak.phase]}: {self.peak.gib:.1f} +- {self.spread:.1f} GiB{has}"


@dataclass(frozen=True)
class JobPlan:
    """The plan of a job.

    Attributes:
        job: Inputs of the plan.
        model: Parameter counts of the model.
        nodes: Number of ranks of each node.
        work: Samples of a step.
        memory: Estimated memory of GPUs and nodes.
        needs: Memory of the fullest GPU and of the fullest node, among those with the worst verdict.
        cache: Cache of an engine's replica.
        generated: Generation of a step; None if the rates of the GPUs are not known.
        time: Time of a step; None if the rates of the GPUs are not known, or the job does not train.
    """

    job: MemoryInputs
    model: ModelSize
    nodes: tuple[int, ...]
    work: Workload
    memory: MemoryEstimate
    needs: tuple[Need, ...]
    cache: Cache
    generated: Generation | None
    time: StepTime | None

    @property
    def binding(self) -> Need:
        """The need that is closest to its limit, or furthest beyond."""
        return max(self.needs, key=lambda need: (need.verdict not in ROOM, need.verdict == "does not fit", need.share, need.peak.gib))

    @property
    def has_room(self) -> bool:
        """Whether the job fits as far as its sizes are known."""
        return self.verdict in ROOM

    @property
    def verdict(self) -> Verdict:
        """The worst verdict of all needs."""
        return max((need.verdict for need in self.needs), key=ORDER.index)


def plan_job(job: MemoryInputs, nodes: tuple[int, ...]) -> JobPlan:
    """Plans a job.

    Args:
        job: Job of a known model, with a layout that ``check_layout`` accepts.
        nodes: Number of ranks of each of its nodes.
    """
    assert job.model is not None
    work, memory = workload(job.config), estimate_memory(job)
    cache, gpu = replica_cache(job, job.model, work), gpu_of(job.config)
    generated = generation(job, job.model, work, cache, gpu, nodes[0]) if gpu and job.on_gpu else None
    time = step_time(job, job.model, work, generated, gpu, nodes[0]) if gpu and generated and job.config.mode == "train" else None
    return JobPlan(job, job.model, nodes, work, memory, needs_of(job, memory, nodes), cache, generated, time)


def gpu_of(config: Config) -> Gpu | None:
    """The rates of the cluster's GPUs, from its config or else by their name; None if they are not known."""
    cluster, known = config.cluster, known_gpu(config.cluster.gpu)
    flops, link = cluster.gpu_bf16_tflops * 1e12, cluster.gpu_link_gbs
    memory = config.plan.assume.memory_gbs or (known.memory_gbs if known else 0.0)
    found = Gpu(flops or (known.flops if known else 0.0), memory, link or (known.link_gbs if known else 0.0))
    return found if found.flops and found.memory_gbs and found.link_gbs else None


def may_have_room(job: MemoryInputs, nodes: tuple[int, ...]) -> bool:
    """Whether the job could fit with other recomputation and packs: whether it does without activations."""
    return _has_room(job, nodes, has_activations=False)


def has_room(job: MemoryInputs, nodes: tuple[int, ...]) -> bool:
    """Whether ``plan_job`` would find that the job fits; faster than the whole plan."""
    return _has_room(job, nodes, has_activations=True)


def _has_room(job: MemoryInputs, nodes: tuple[int, ...], *, has_activations: bool) -> bool:
    floor, cluster = memory_floor(job), job.config.cluster
    if job.on_gpu and 0 < cluster.gpu_memory_gib < floor.gpu().gib:
        return False  # whatever comes on top
    memory = estimate_memory(job, floor, has_activations=has_activations)
    return all(need.verdict in ROOM for need in chain(_of_gpus(job, memory), _of_nodes(job, memory, nodes)))


def needs_of(job: MemoryInputs, memory: MemoryEstimate, nodes: tuple[int, ...]) -> tuple[Need, ...]:
    """The needs of a GPU and of a node with the worst verdict over all stages and phases; the fullest of equally bad ones."""
    each = ([*_of_gpus(job, memory)], [*_of_nodes(job, memory, nodes)])
    return tuple(max(needs, key=lambda need: (ORDER.index(need.verdict), need.peak.gib)) for needs in each if needs)


def _of_gpus(job: MemoryInputs, memory: MemoryEstimate) -> Iterator[Need]:
    """Yields the need of one GPU of each stage in each phase, of equal stages only once."""
    if not job.on_gpu:
        return
    has, certain = job.config.cluster.gpu_memory_gib, memory.floor.gpu().gib
    alike = {id(stage): number for number, stage in reversed([*enumerate(memory.expected.stages)])}
    for stage, phase in product(sorted(alike.values()), PHASES):
        yield Need(f"a GPU of stage {stage}", "cluster.gpu_memory_gib", *memory.gpu_of_stage(stage, phase), certain, has)


def _of_nodes(job: MemoryInputs, memory: MemoryEstimate, nodes: tuple[int, ...]) -> Iterator[Need]:
    """Yields the need of the fullest node in each phase."""
    has, floors = job.config.cluster.host_memory_gib, [memory.floor.fullest_host(nodes, [phase]) for phase in PHASES]
    certain = max(floor.gib for floor in floors)
    for phase, floor in zip(PHASES, floors, strict=True):
        peak = memory.expected.fullest_host(nodes, [phase])
        yield Need("a node", "cluster.host_memory_gib", peak, memory.spread(peak, floor), certain, has)
