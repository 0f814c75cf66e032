"""Counts the least memory of a job in each phase: the parts that are certainly held on a GPU and on a node, by name.

This is a floor, not a plan: activations, the libraries' own memory, fragmentation and the sync's buffers come on top. A job with less
memory than the floor cannot work, which is better said before it has run for hours.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate

from rlbatch.api import OffloadMemory
from rlbatch.config.evaluation import eval_sets
from rlbatch.config.schema import Config
from rlbatch.plan.engine_memory import GIB, WEIGHT_BYTES, MemoryInputs, engine_memory
from rlbatch.plan.parameters import Share, least_share

PHASES = ("load", "start", "sync", "generate", "log-probs", "update", "save")
"""Phases of a job. In ``load`` the model is built and filled; in ``start`` engines start, before the optimizer has moments."""
EVALUATING = ("load", "start", "sync", "generate")
"""Phases of a job that only evaluates."""
WITH_CACHE = ("start", "generate")
"""Phases in which engines have all of their memory on GPUs."""
BESIDE_ENGINES = (*WITH_CACHE, "sync")
"""Phases in which engines have memory on GPUs, in the sync only for weights. In all others engines sleep, if they can."""
WHEN = {
    "load": "while the model is loaded",
    "start": "while engines start",
    "sync": "in the weight sync",
    "generate": "while engines generate",
    "log-probs": "for log-probs",
    "update": "in updates",
    "save": "while a checkpoint is saved",
}
PROCESS_GIB = {"cpu": 0.25, "gpu": 2.0}
"""Host memory of the process of a rank or of one engine GPU, GiB: Python, torch and, on GPUs, the libraries of CUDA and NCCL."""
NODE_SHM_GIB = 1.0
"""Size that /dev/shm needs on a node with several GPUs, GiB, for NCCL and engines. Containers have 64 MiB unless configured."""
GRADIENT_BYTES = 4
MAIN_WEIGHT_BYTES = {"bf16": 4, "fp32": 0}
MOMENT_BYTES = 8
STATE_BYTES = 12
"""Bytes of each parameter's optimizer state: fp32 main weight and moments."""
STATE = ("main weights", "moments")
LEFT = "optimizer state that left the GPU"
UNKNOWN = OffloadMemory(releases_gradients=True, hosted_share=1.0, moves_weights=True)
"""Assumption for offload strategies that do not describe themselves: everything that can leaves the GPU, and takes no host memory."""

Parts = Mapping[str, float]
"""Name of a part of memory -> bytes."""
_NOTHING: Mapping[str, Parts] = {phase: {} for phase in PHASES}


@dataclass(frozen=True)
class RankMemory:
    """Memory that a rank of a pipeline stage takes: phase -> parts.

    Attributes:
        gpu: Parts on the rank's GPU; empty on CPUs, where ``host`` has them.
        host: The rank's parts of the host memory of its node.
        undecided: Parameters whose optimizer state may be on GPU or host, as it is divided in whole tensors; no floor has them.
    """

    gpu: Mapping[str, Parts]
    host: Mapping[str, Parts]
    undecided: float = 0.0


@dataclass(frozen=True)
class Peak:
    """The memory of a phase, often of the one that takes most.

    Attributes:
        phase: One of ``PHASES``.
        parts: Sizes of its parts.
    """

    phase: str = ""
    parts: Parts = field(default_factory=dict)

    @property
    def gib(self) -> float:
        """Sum of all parts, GiB."""
        return sum(self.parts.values()) / GIB

    def described(self) -> str:
        """Text such as ``117.2 GiB in updates (gradients 78.1, weights 39.1)``."""
        return f"{self.gib:.1f} GiB {WHEN[self.phase]} ({self.parts_listed()})"

    def parts_listed(self) -> str:
        """Text that lists the parts in GiB, the largest first."""
        parts = sorted(((size / GIB, name) for name, size in self.parts.items()), reverse=True)
        return ", ".join(f"{name} {gib:.1f}" for gib, name in parts if gib >= 0.05)


@dataclass(frozen=True)
class MemoryFloor:
    """Least memory of a job.

    Attributes:
        stages: Memory of a rank of each pipeline stage. Ranks are numbered stage by stage.
        world_size: Number of ranks.
        shm_gib: Size of /dev/shm that a node with several ranks needs, GiB.
    """

    stages: Sequence[RankMemory] = (RankMemory(_NOTHING, _NOTHING),)
    world_size: int = 1
    shm_gib: float = 0.0

    def gpu(self, ranks: Iterable[int] | None = None, phases: Iterable[str] = PHASES) -> Peak:
        """The peak of the fullest GPU of these ranks (None: of all) in these phases."""
        stages = self.stages if ranks is None else [self.stages[stage] for stage in self._stages(ranks)]
        return _largest(Peak(phase, stage.gpu[phase]) for stage in stages for phase in phases)

    def host(self, ranks: Iterable[int], phases: Iterable[str] = PHASES) -> Peak:
        """The peak host memory of a node with these ranks in these phases."""
        stages = self._stages(ranks)
        return _largest(self._host(stages, phase) for phase in phases)

    def fullest_host(self, nodes: Iterable[int], phases: Iterable[str] = PHASES) -> Peak:
        """The peak host memory of the fullest node. ``nodes`` are the numbers of ranks of each node."""
        alike: dict[tuple[tuple[int, int], ...], Mapping[int, int]] = {}
        for stages in _nodes_stages(tuple(nodes), len(self.stages), self.world_size):  # stages that are alike are one object
            alike.setdefault(tuple((id(self.stages[stage]), ranks) for stage, ranks in stages.items()), stages)
        return _largest(self._host(stages, phase) for stages in alike.values() for phase in phases)

    def _host(self, stages: Mapping[int, int], phase: str) -> Peak:
        parts: dict[str, float] = {}
        for stage, ranks in stages.items():
            for name, size in self.stages[stage].host[phase].items():
                parts[name] = parts.get(name, 0.0) + size * ranks
        return Peak(phase, parts)

    def _stages(self, ranks: Iterable[int]) -> Mapping[int, int]:
        return _stages(ranks, len(self.stages), self.world_size)


def memory_floor(job: MemoryInputs) -> MemoryFloor:
    """Counts the least memory of trainer and engines. If the model is known, ``check_layout`` accepts the layout."""
    engine, shares = _engine(job), _shares(job)
    alike: dict[Share, RankMemory] = {}
    for share in dict.fromkeys(shares):
        trainer, host = _trainer(job, share), _host(job, share)
        gpu: Mapping[str, Parts] = {phase: {**trainer[phase], **engine[phase]} if trainer[phase] else {} for phase in PHASES}
        if not job.on_gpu:
            gpu, host = _NOTHING, {phase: {**host[phase], **gpu[phase]} for phase in PHASES}
        alike[share] = RankMemory(gpu, host, _undecided(job, share))
    return MemoryFloor([alike[share] for share in shares], job.config.layout.world_size, NODE_SHM_GIB if job.on_gpu else 0.0)


def trainer_gib(job: MemoryInputs) -> float:
    """Memory that the trainer keeps on each GPU of an engine while the engine starts or generates, GiB."""
    if not job.shape.is_colocated:
        return 0.0
    trainers = [_trainer(job, share) for share in dict.fromkeys(_shares(job))]
    return max(sum(trainer[phase].values()) for trainer in trainers for phase in WITH_CACHE) / GIB


def engine_share_gib(job: MemoryInputs, trainer: float) -> float:
    """Memory that an engine takes of each of its GPUs, GiB, with its cache, beside a trainer that keeps ``trainer`` GiB of each."""
    total, shape = job.config.cluster.gpu_memory_gib, job.shape
    return shape.memory_share * (total - trainer if shape.is_share_of_free else total)


def _shares(job: MemoryInputs) -> tuple[Share, ...]:
    layout = job.config.layout
    return job.model.shares(layout) if job.model else (least_share(job.config.model.parameters, layout),)


def _undecided(job: MemoryInputs, share: Share) -> float:
    """Parameters of a rank whose optimizer state may be on the GPU or on the host, as it is divided in whole tensors."""
    hosted = (job.offload or UNKNOWN).hosted_share
    return min(share.largest, share.owned * (1 - hosted)) if hosted else 0.0


def _trainer(job: MemoryInputs, share: Share) -> Mapping[str, Parts]:
    """Bytes that the trainer takes on a rank's GPU, or in its host memory on CPUs, by phase."""
    config, offload, precision = job.config, job.offload or UNKNOWN, job.config.train.precision
    own = share.owned * (1 - offload.hosted_share) - _undecided(job, share)
    weights = {"weights": WEIGHT_BYTES[precision] * share.held}
    gradients = {"gradients": GRADIENT_BYTES * share.held}
    main = {"main weights": MAIN_WEIGHT_BYTES[precision] * own}
    moments = {"moments": MOMENT_BYTES * own}
    moving = {"weights on their way into a buffer": WEIGHT_BYTES[precision] * share.last_buffer} if job.on_gpu else {}
    kept = {} if offload.releases_gradients else gradients
    resting, beside_cache = weights | kept, kept if offload.moves_weights else weights | kept
    state = main | moments if updates_before_generating(config) else main
    if config.mode == "eval":
        return {phase: weights if phase in EVALUATING else {} for phase in PHASES}
    scoring = resting | state
    updating = weights | gradients | main | moments
    return {
        "load": weights | gradients | max(main, moving, key=lambda parts: sum(parts.values())),
        "start": beside_cache | ({} if offload.moves_weights and offload.moves_state else main),
        "sync": resting if offload.moves_state else scoring,
        "generate": beside_cache | ({} if offload.moves_state else state),
        "log-probs": scoring,
        "update": updating,
        "save": weights | main | moments,
    }


def _engine(job: MemoryInputs) -> Mapping[str, Parts]:
    """Bytes that the engine takes on a rank's GPU, or in its host memory on CPUs, by phase."""
    memory, shape = engine_memory(job), job.shape
    if not shape.is_colocated:
        return _NOTHING
    weights, cache = {"engine's weights": memory.weights * GIB}, {"engine's cache": memory.cache * GIB}
    staying: Parts = {}
    if shape.asleep == "gpu" or (not job.on_gpu and (shape.asleep == "host" or shape.gone_options)):  # nothing sleeps on CPUs
        share = engine_share_gib(job, trainer_gib(job)) if job.on_gpu and shape.fills_share and shape.memory_share < 1 else 0.0
        kept = max(memory.cache, share - memory.weights) if job.has_process else 0.0
        staying = weights | {"engine's cache": kept * GIB}
    return {
        "load": {},
        "start": weights | cache,
        "sync": weights,
        "generate": weights | cache,
        **dict.fromkeys(("log-probs", "update", "save"), staying),
    }


def _host(job: MemoryInputs, share: Share) -> Mapping[str, Parts]:
    """Bytes that a rank takes of its node's host memory, by phase, beside what a GPU would hold."""
    config, offload, shape = job.config, job.offload or UNKNOWN, job.shape
    process = PROCESS_GIB["gpu" if job.on_gpu else "cpu"] * GIB
    always = {"processes": process * (2 if job.has_process else 1)}
    if job.has_reference:
        always["reference model"] = WEIGHT_BYTES[config.train.precision] * share.held
    hosted = {"optimizer": offload.hosted_bytes * offload.hosted_share * share.owned}
    if offload.hosted_share and config.mode != "eval":
        always["optimizer"] = (STATE_BYTES - MOMENT_BYTES) * offload.hosted_share * share.owned  # weights; the rest comes with updates
    trainer = _trainer(job, share)
    loaded = started = always
    if job.offload and offload.moves_weights and config.mode != "eval":
        always = always | {"weights that left the GPU": trainer["sync"]["weights"]}
        started = always | ({LEFT: trainer["save"]["main weights"]} if offload.moves_state else {})
    moved = {LEFT: sum(size for name, size in trainer["log-probs"].items() if name in STATE)} if offload.moves_state else {}
    later = always | hosted | moved
    asleep = {}
    if job.on_gpu and shape.is_colocated and shape.asleep == "host":
        asleep = {"weights of sleeping engines": engine_memory(job).weights * GIB}
    generating = later if updates_before_generating(config) else always | moved
    return {
        "load": loaded,
        "start": started,
        "sync": generating,
        "generate": generating,
        "log-probs": generating | asleep,
        **dict.fromkeys(("update", "save"), later | asleep),
    }


def updates_before_generating(config: Config) -> bool:
    """Whether engines generate after an update, which creates Adam's moments."""
    return config.train.steps > 1 or bool(eval_sets(config))


def _largest(peaks: Iterable[Peak]) -> Peak:
    return max(peaks, key=lambda peak: peak.gib)


def _stages(ranks: Iterable[int], stages: int, world_size: int) -> Mapping[int, int]:
    """Number of the ranks that are of each stage."""
    return Counter(rank * stages // world_size for rank in ranks)


@cache
def _nodes_stages(nodes: tuple[int, ...], stages: int, world_size: int) -> tuple[Mapping[int, int], ...]:
    """Numbers of ranks of each stage that a node has, for each different node."""
    ends = accumulate(nodes)
    found = [_stages(range(end - count, end), stages, world_size) for end, count in zip(ends, nodes, strict=True)]
    return tuple({tuple(each.items()): each for each in found}.values())
