"""Counts the least memory of an engine: its weights, and the cache of one longest sample."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from rlbatch.api import EngineShape, ModelFamily, OffloadMemory
from rlbatch.config.evaluation import longest_response
from rlbatch.config.schema import Config
from rlbatch.plan.engine_precision import has_fp8_engines
from rlbatch.plan.parameters import ModelSize, PartSize
from rlbatch.registry import Registry

GIB = 2**30
WEIGHT_BYTES = {"bf16": 2, "fp32": 4}
FP8_COMPUTES_IN = 2
"""Bytes of what an fp8 engine does not quantise: it computes in bf16, whatever the trainer does."""


@dataclass(frozen=True)
class MemoryInputs:
    """What the memory of a job follows from.

    Attributes:
        config: Complete.
        model: Its parameters; None: not known, then ``model.parameters`` counts.
        offload: What the offload strategy does with memory; None: not known.
        shape: Of an engine.
        gpus: Of an engine.
        has_process: Whether engines are processes of their own.
        is_fp8: Whether their matrices are, as model families have them: all but vocabulary, routers and norms.
        draft: Whose weights they speculate with; see ``RolloutSpec``.
        on_gpu: Whether ranks have GPUs.
        has_reference: Whether ranks keep a reference model.
    """

    config: Config
    model: ModelSize | None
    offload: OffloadMemory | None
    shape: EngineShape
    gpus: int
    has_process: bool
    is_fp8: bool
    draft: str | None
    on_gpu: bool
    has_reference: bool


def memory_inputs(config: Config, registry: Registry, family: ModelFamily | None, *, on_gpu: bool) -> MemoryInputs:
    """Asks the plugins of a job; raises RlbatchError for options that cannot be."""
    return MemoryInputs(
        config,
        ModelSize(family) if family else None,
        registry.offload_memory(config),
        registry.engine_shape(config),
        registry.ranks_per_engine(config),
        registry.rollout(config).has_engine,
        has_fp8_engines(config, registry, family),
        registry.draft(config),
        on_gpu,
        registry.needs_reference(config.algorithm),
    )


def changed_inputs(job: MemoryInputs, config: Config, registry: Registry) -> MemoryInputs:
    """The same model's job with another config; raises as ``memory_inputs``."""
    return replace(memory_inputs(config, registry, None, on_gpu=job.on_gpu), model=job.model, is_fp8=job.is_fp8)


@dataclass(frozen=True)
class EngineMemory:
    """Least memory of an engine on each of its GPUs, GiB.

    Attributes:
        weights: All but the routed experts over the GPUs of a replica, those over all.
        cache: Keys and values of one longest sample.
    """

    weights: float
    cache: float

    @property
    def total(self) -> float:
        """Both."""
        return self.weights + self.cache


def engine_memory(job: MemoryInputs) -> EngineMemory:
    """The floor of an engine."""
    shape, config = job.shape, job.config
    full = plain_bytes(job)
    if job.model is None:
        weights, cache = config.model.parameters * (1 if job.is_fp8 else full) / job.gpus, 0.0
    else:
        part = job.model.total + (job.model.carried if job.draft == "" else PartSize())
        weights = _weights(part, job, full) + (_folder_bytes(Path(job.draft)) / job.gpus if job.draft else 0)
        tokens = shape.context_tokens or longest_response(config)[0]
        cache = tokens * cache_bytes(job.model.family, shape, cached_bytes(job))
    return EngineMemory(max(weights / GIB - shape.offloaded_gib, 0.0), cache / GIB)


def plain_bytes(job: MemoryInputs) -> float:
    """Bytes of an engine's number that is not quantised."""
    return job.shape.value_bytes or (FP8_COMPUTES_IN if job.is_fp8 else WEIGHT_BYTES[job.config.train.precision])


def cached_bytes(job: MemoryInputs) -> float:
    """Bytes of a number in an engine's cache."""
    return job.shape.cached_bytes or plain_bytes(job)


def cache_bytes(family: ModelFamily, shape: EngineShape, value_bytes: float) -> float:
    """Counts an engine's keys and values, for one token on each GPU of a replica, which share it; ``value_bytes``: of one number."""
    model, layers = family.transformer, family.num_layers / shape.stages
    if model.get("multi_latent_attention"):  # the latent part is on every tensor-parallel GPU
        return float(layers * (model["kv_lora_rank"] + model["qk_pos_emb_head_dim"]) * value_bytes)
    groups = model.get("num_query_groups") or model["num_attention_heads"]
    return float(layers * 2 * max(groups * shape.stages / shape.replica_gpus, 1) * family.head_sizes[0] * value_bytes)


def _weights(part: PartSize, job: MemoryInputs, full: float) -> float:
    """Bytes on each GPU."""
    small, plain = 1 if job.is_fp8 else full, part.vocabulary + part.unquantised
    return ((part.dense - plain) * small + plain * full) / job.shape.replica_gpus + part.experts * small / job.gpus


def _folder_bytes(folder: Path) -> int:
    """Size of a model's weights on disk."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))
