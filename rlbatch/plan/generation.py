"""Estimates how engines generate: how many tokens their cache holds, whether they preempt samples, how long a step's samples take."""

from __future__ import annotations

from dataclasses import dataclass

from rlbatch.plan.engine_memory import GIB, MemoryInputs, cache_bytes, cached_bytes, engine_memory, plain_bytes
from rlbatch.plan.flops import attention_flops_per_squared_token, model_flops
from rlbatch.plan.hardware import Gpu
from rlbatch.plan.memory import engine_share_gib, trainer_gib
from rlbatch.plan.parameters import ModelSize
from rlbatch.plan.workload import POINTS, Workload


@dataclass(frozen=True)
class Cache:
    """The cache of keys and values of an engine's data-parallel replica.

    Attributes:
        tokens: Tokens that the cache holds; 0 if that is not known.
        samples: Samples that the replica generates at once.
        needed: Tokens of these samples if all have the mean length.
        needed_most: Tokens of these samples if all have the greatest possible length.
    """

    tokens: int
    samples: int
    needed: float
    needed_most: float

    @property
    def warning(self) -> str:
        """Warning that the engine will preempt samples for lack of cache; empty if it never does."""
        if not self.tokens or self.needed_most <= self.tokens:
            return ""
        each = self.tokens // self.samples
        often = "as soon as they are of mean length" if self.needed > self.tokens else "where many are long"
        return (
            f"a replica's cache holds {self.tokens:,} tokens, {each:,} of each of {self.samples} samples at once, which may have "
            f"{self.needed_most / self.samples:,.0f}: the engine preempts samples {often}"
        )


def replica_cache(job: MemoryInputs, model: ModelSize, work: Workload, trainer: float | None = None) -> Cache:
    """Sizes the cache of a data-parallel replica.

    Args:
        job: Job whose engines have the cache.
        model: Parameter counts of the model.
        work: Samples of a step.
        trainer: Memory that the trainer keeps of each GPU, GiB; None: as much as the job's own does.
    """
    shape, assume, samples = job.shape, job.config.plan.assume, samples_at_once(job, work)
    room = 0.0
    if job.config.cluster.gpu_memory_gib and job.on_gpu:
        beside = trainer_gib(job) if trainer is None and shape.is_share_of_free else trainer or 0.0
        share = engine_share_gib(job, beside)
        room = max(share - engine_memory(job).weights - assume.engine_workspace_gib, 0.0) * GIB
    tokens = int(room / cache_bytes(model.family, shape, cached_bytes(job)))
    return Cache(tokens, samples, samples * (work.prompt + work.response), samples * float(work.longest))


def samples_at_once(job: MemoryInputs, work: Workload) -> int:
    """Samples that a replica generates at once: all of its samples of a step, or the engine's limit."""
    here = _samples_here(job, work)
    return min(here, job.shape.samples_at_once) if job.shape.samples_at_once else here


def _samples_here(job: MemoryInputs, work: Workload) -> int:
    """Samples of a step that each replica generates."""
    replicas = max(job.config.layout.world_size // job.gpus, 1) * job.shape.replicas
    return -(-work.samples // replicas)


@dataclass(frozen=True)
class Generation:
    """The generation phase of a step.

    Attributes:
        seconds: Duration on the replica that takes longest.
        tail_seconds: The part of ``seconds`` in which fewer than half of the samples at once are left.
        tokens_per_second: Generated tokens of all engines a second.
    """

    seconds: float
    tail_seconds: float
    tokens_per_second: float


def generation(job: MemoryInputs, model: ModelSize, work: Workload, cache: Cache, gpu: Gpu, ranks_per_node: int) -> Generation:
    """Estimates the generation of a step by simulating its decoding steps; fewer samples have the later tokens.

    Samples are taken as started longest first, so the tail is the shortest possible, and a larger cache never makes it slower. A decoding
    step takes the longest of: reading the weights that it needs and the cache from GPU memory, the matrix products, the host's work for
    kernels that no CUDA graph starts, and its work for samples. Collectives come on top.
    """
    assume, shape = job.config.plan.assume, job.shape
    here = _samples_here(job, work)
    fitting = int(cache.tokens / (work.prompt + work.response)) if cache.tokens else cache.samples
    at_once = max(min(cache.samples, fitting, here), 1)
    step = _Step(job, model, gpu, ranks_per_node)
    width, seconds, tail = work.longest_response / POINTS, 0.0, 0.0
    for index, share in enumerate(work.surviving):
        wanted = here * share  # samples that have this token
        if wanted < 0.5:
            break
        running = min(wanted, float(at_once))
        spent = width * wanted / running * step.seconds(running, work.prompt + (index + 0.5) * width)
        seconds += spent
        tail += spent if running < at_once / 2 else 0.0
    forward = model_flops(model) * work.prompt + attention_flops_per_squared_token(model.family) * work.prompt**2
    prefill = here * forward / (shape.replica_gpus * gpu.flops * assume.matmul_efficiency)
    seconds = (seconds + prefill) * assume.generate_factor
    return Generation(seconds, tail * assume.generate_factor, work.samples * work.response / seconds)


class _Step:
    """Times of single decoding steps of an engine."""

    def __init__(self, job: MemoryInputs, model: ModelSize, gpu: Gpu, ranks_per_node: int) -> None:
        self._assume, self._shape, family = job.config.plan.assume, job.shape, model.family
        weights = engine_memory(job).weights * GIB
        self._experts = min(model.total.experts * (1 if job.is_fp8 else plain_bytes(job)) / job.gpus, weights)
        self._others = weights - self._experts
        self._cache = cache_bytes(family, job.shape, cached_bytes(job))
        chosen = int(family.transformer.get("moe_router_topk", 2)) / family.num_experts if family.num_experts else 0.0
        self._idle = 1 - chosen
        self._flops = model_flops(model) / job.shape.replica_gpus / (gpu.flops * self._assume.matmul_efficiency)
        self._bandwidth = gpu.memory_gbs * 1e9 * self._assume.decode_efficiency
        within = 2 * (job.shape.replica_gpus > 1)  # after attention and after the MLP
        between = 2 * (job.gpus > ranks_per_node)  # to the experts and back
        collectives = within * self._assume.decode_collective_us + between * self._assume.decode_network_us
        self._collectives = family.num_layers * collectives * 1e-6
        self._host = family.num_layers * job.shape.is_eager * self._assume.decode_eager_ms * 1e-3

    def seconds(self, samples: float, context: float) -> float:
        """Seconds of a step in which each replica decodes ``samples`` samples, each with ``context`` tokens before the new one."""
        met = 1 - float(self._idle ** (samples * self._shape.replicas))
        read = (self._others + self._experts * met + samples * context * self._cache) / self._bandwidth
        return max(read, samples * self._flops, self._host, samples * self._assume.decode_sample_ms * 1e-3) + self._collectives
