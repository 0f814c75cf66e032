"""Estimates the memory of a job in each phase: the floor, which is certainly held, and what comes on top of it.

Parts of the floor have no error; every other part has the error ``plan.assume.memory_error``. Sizes on top of the floor come from
``activations`` (derived from the code) and ``plan.assume`` (each with its source).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rlbatch.plan.activations import NO_ACTIVATIONS, StageActivations, stage_activations
from rlbatch.plan.engine_memory import GIB, WEIGHT_BYTES, MemoryInputs
from rlbatch.plan.layout import degrees
from rlbatch.plan.memory import (
    BESIDE_ENGINES,
    LEFT,
    MOMENT_BYTES,
    PHASES,
    STATE_BYTES,
    WITH_CACHE,
    MemoryFloor,
    Parts,
    Peak,
    RankMemory,
    engine_share_gib,
    memory_floor,
    trainer_gib,
    updates_before_generating,
)
from rlbatch.plan.workload import microbatches, pack_tokens, workload

MIB = 2**20
SHARED = ("engine's cache", "engine's workspace")
"""Parts whose sum is an engine's share of the GPU, which it keeps to. They add no error."""
ACTIVATIONS = "activations that left the GPU"
"""What ``layout.offload_modules`` takes of a host: its memory stays once it was made."""
DIVIDED = "optimizer, in whole tensors"
"""Half of the optimizer state that either the GPU or the host has: each may have all of it or nothing, and so has every rank of a stage."""


@dataclass(frozen=True)
class MemoryEstimate:
    """The memory that a job is expected to take.

    Attributes:
        floor: Memory that is certainly held.
        expected: All expected memory, with the floor.
        error: Relative error of each part that is not in the floor, but of ``DIVIDED``.
    """

    floor: MemoryFloor
    expected: MemoryFloor
    error: float

    def spread(self, expected: Peak, floor: Peak) -> float:
        """The error of an expected peak, plus or minus GiB."""
        own = sum(size for name, size in expected.parts.items() if name not in (*SHARED, DIVIDED, *floor.parts))
        return (self.error * own + expected.parts.get(DIVIDED, 0.0)) / GIB

    def gpu_of_stage(self, stage: int, phase: str) -> tuple[Peak, float]:
        """The peak of a rank of the stage on its GPU in a phase, and its error in GiB."""
        peak, certain = (Peak(phase, memory.stages[stage].gpu[phase]) for memory in (self.expected, self.floor))
        return peak, self.spread(peak, certain)

    def gpu(self) -> tuple[int, Peak, float]:
        """The stage whose GPUs take most in any phase, that peak, and its error in GiB."""
        found = [(stage, *self.gpu_of_stage(stage, phase)) for stage in range(len(self.expected.stages)) for phase in PHASES]
        return max(found, key=lambda each: each[1].gib)

    def host(self, nodes: tuple[int, ...], phase: str) -> tuple[Peak, float]:
        """The peak host memory of the fullest node in a phase, and its error in GiB. ``nodes`` are the ranks of each node."""
        peak, certain = (memory.fullest_host(nodes, [phase]) for memory in (self.expected, self.floor))
        return peak, self.spread(peak, certain)


def estimate_memory(job: MemoryInputs, floor: MemoryFloor | None = None, *, has_activations: bool = True) -> MemoryEstimate:
    """Estimates the memory of trainer, engines and libraries.

    Args:
        job: Job of a known model, with a layout that ``check_layout`` accepts.
        floor: Floor of the job, if it was counted already.
        has_activations: Whether to add activations. Without them it is the least memory with any recomputation and packs.
    """
    floor, assume = floor or memory_floor(job), job.config.plan.assume
    activations = _activations(job) if has_activations else (NO_ACTIVATIONS,) * len(floor.stages)
    stages, alike = list(zip(floor.stages, activations, strict=True)), dict[tuple[int, StageActivations], RankMemory]()
    for certain, kept in stages:
        if (id(certain), kept) not in alike:
            alike[id(certain), kept] = RankMemory(
                {phase: {**certain.gpu[phase], **more} for phase, more in _on_gpu(job, certain, kept)} if job.on_gpu else certain.gpu,
                {
                    phase: {**parts, **_on_host(job, kept, phase), **_divided(job, certain, phase, parts)}
                    for phase, parts in certain.host.items()
                },
            )
    expected = [alike[id(certain), kept] for certain, kept in stages]
    return MemoryEstimate(floor, MemoryFloor(expected, floor.world_size, floor.shm_gib), assume.memory_error)


def _activations(job: MemoryInputs) -> tuple[StageActivations, ...]:
    assert job.model is not None
    config, family, work = job.config, job.model.family, workload(job.config)
    return stage_activations(
        family,
        config.layout,
        value_bytes=WEIGHT_BYTES[config.train.precision],
        tokens=pack_tokens(config, work),
        chunk=config.train.logprob_chunk_tokens,
        microbatches=microbatches(config, work, degrees(config.layout, family.num_layers)),
        imbalance=config.plan.assume.expert_imbalance,
    )


def _on_gpu(job: MemoryInputs, certain: RankMemory, activations: StageActivations) -> Iterator[tuple[str, Parts]]:
    """Yields each phase with the parts in bytes that come on top of the floor on a GPU."""
    assume, is_eval = job.config.plan.assume, job.config.mode == "eval"
    always = {"CUDA and NCCL": assume.cuda_gib * GIB}
    process = {"engine's process": assume.engine_process_gib * GIB} if job.has_process and job.shape.is_colocated else {}
    others = {**always, **process, **_divided(job, certain, "update", certain.gpu["update"])}
    logits = activations.kept_logits if _keeps_logits(job, certain, activations, others) else activations.logits
    counted: Mapping[str, Parts] = {
        "update": {
            "activations": activations.kept,
            "logits": max(logits - activations.working, 0.0),
            "layer in work": activations.working,
            "expert imbalance": activations.imbalance,
        },
        "log-probs": {"layer in work": activations.scoring, "logits": max(activations.scoring_logits - activations.scoring, 0.0)},
    }
    trained = {phase: {name: size * assume.activations_factor for name, size in parts.items()} for phase, parts in counted.items()}
    for phase in PHASES:
        parts = {**always, **_divided(job, certain, phase, certain.gpu[phase])} if certain.gpu[phase] else {}
        if phase in trained and not is_eval:
            parts |= trained[phase]
        if phase in BESIDE_ENGINES:
            parts |= _engine(job, certain, phase)
        if phase != "load" and parts:
            parts |= process
        own = sum(size for name, size in {**certain.gpu[phase], **parts}.items() if not name.startswith(("engine's", "CUDA")))
        if parts:
            parts["fragmentation"] = assume.fragmentation * own
        yield phase, parts


def _keeps_logits(job: MemoryInputs, certain: RankMemory, activations: StageActivations, others: Parts) -> bool:
    """Whether a pack's logits take at most half of the free memory, so that ``rlbatch.megatron.logprobs`` keeps them."""
    used = sum(certain.gpu["update"].values()) + sum(others.values()) + activations.kept
    return activations.kept_logits <= (job.config.cluster.gpu_memory_gib * GIB - used) / 2


def _engine(job: MemoryInputs, certain: RankMemory, phase: str) -> Parts:
    """Bytes that an engine takes on a GPU on top of the floor: its workspace, and the rest of its share or the buffers of a sync."""
    shape, assume, floor = job.shape, job.config.plan.assume, certain.gpu[phase]
    if not shape.is_colocated or "engine's weights" not in floor:
        return {}
    workspace = {"engine's workspace": assume.engine_workspace_gib * GIB} if job.has_process else {}
    if phase == "sync":
        assert job.model is not None
        family = job.model.family
        tensor = family.vocab_size * int(family.transformer["hidden_size"]) * WEIGHT_BYTES[job.config.train.precision]
        return workspace | {"sync's buffers": 2.0 * max(job.config.rollout.bucket_mib * MIB, tensor)}
    if not (job.has_process and shape.memory_share < 1 and shape.fills_share and job.config.cluster.gpu_memory_gib):
        return workspace
    divided = max(sum(_divided(job, certain, each, certain.gpu[each]).values()) for each in WITH_CACHE) / GIB
    rest = (engine_share_gib(job, trainer_gib(job) + divided) - assume.engine_workspace_gib) * GIB - floor["engine's weights"]
    return workspace | {"engine's cache": max(rest, floor["engine's cache"])}


def _divided(job: MemoryInputs, certain: RankMemory, phase: str, parts: Parts) -> Parts:
    """``DIVIDED`` and its bytes on the GPU or on the host, whose ``parts`` hold some optimizer state in this phase; else empty."""
    if not certain.undecided:
        return {}
    assert job.offload is not None
    main = STATE_BYTES - MOMENT_BYTES
    left = STATE_BYTES if phase != "start" and updates_before_generating(job.config) else main
    hosted = main if phase in ("load", "start") else job.offload.hosted_bytes
    sizes = {"optimizer": hosted, LEFT: left, "main weights": main, "moments": MOMENT_BYTES}
    held = sum(size for name, size in sizes.items() if name in parts)
    return {DIVIDED: certain.undecided / 2 * held} if held else {}


def _on_host(job: MemoryInputs, activations: StageActivations, phase: str) -> Parts:
    """Bytes that a rank takes of host memory on top of the floor in a phase."""
    assume, config = job.config.plan.assume, job.config
    parts = {"operating system, data, rewards": assume.node_gib * GIB / min(config.cluster.gpus_per_node, config.layout.world_size)}
    if activations.moved and job.on_gpu and config.mode != "eval" and phase not in ("load", "start"):
        parts[ACTIVATIONS] = activations.moved * assume.activations_factor
    return parts
