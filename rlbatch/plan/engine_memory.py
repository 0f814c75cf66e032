"""Counts the least memory that an engine needs: its weights, and a cache for one sample of the greatest length."""

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
"""Bytes of each weight that an fp8 engine does not quantise: it computes in bf16, whatever the trainer's precision."""


@dataclass(frozen=True)
class MemoryInputs:
    """The inputs from which the memory of a job follows.

    Attributes:
        config: Complete config of the job.
        model: Parameter counts of the model; None if the model is not known, and ``model.parameters`` is used instead.
        offload: Effect of the offload strategy on memory; None if it is not known.
        shape: Division of an engine over its GPUs.
        gpus: GPUs of an engine.
        has_process: Whether engines run in processes of their own.
        is_fp8: Whether engines hold matrices in fp8: all that the model family lists, not the vocabulary, routers and norms.
        draft: Folder of the weights that engines speculate with; see ``RolloutSpec``.
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
    """Collects the inputs from a job's config and plugins; raises RlbatchError for invalid options."""
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
    """The inputs of the same model's job with another config; raises RlbatchError as ``memory_inputs`` does."""
    return replace(memory_inputs(config, registry, None, on_gpu=job.on_gpu), model=job.model, is_fp8=job.is_fp8)


@dataclass(frozen=True)
class EngineMemory:
    """Least memory that an engine needs on each of its GPUs, GiB.

    Attributes:
        weights: Weights of the model. Routed experts are divided over all of the engine's GPUs, the rest over those of a replica.
        cache: Keys and values of one sample of the greatest length.
    """

    weights: float
    cache: float

    @property
    def total(self) -> float:
        """Weights and cache together, GiB."""
        return self.weights + self.cache


def engine_memory(job: MemoryInputs) -> EngineMemory:
    """The least memory of the job's engines."""
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
    """Bytes of each weight that the engine does not quantise."""
    return job.shape.value_bytes or (FP8_COMPUTES_IN if job.is_fp8 else WEIGHT_BYTES[job.config.train.precision])


def cached_bytes(job: MemoryInputs) -> float:
    """Bytes of each value in the engine's cache of keys and values."""
    return job.shape.cached_bytes or plain_bytes(job)


def cache_bytes(family: ModelFamily, shape: EngineShape, value_bytes: float) -> float:
    """Bytes of keys and values of one token on each GPU of the replica that shares them; a single value has ``value_bytes``."""
    model, layers = family.transformer, family.num_layers / shape.stages
    if model.get("multi_latent_attention"):  # the latent part is on every tensor-parallel GPU
        return float(layers * (model["kv_lora_rank"] + model["qk_pos_emb_head_dim"]) * value_bytes)
    groups = model.get("num_query_groups") or model["num_attention_heads"]
    return float(layers * 2 * max(groups * shape.stages / shape.replica_gpus, 1) * family.head_sizes[0] * value_bytes)


def _weights(part: PartSize, job: MemoryInputs, full: float) -> float:
    """Bytes of a model part's weights on each GPU of the engine."""
    small, plain = 1 if job.is_fp8 else full, part.vocabulary + part.unquantised
    return ((part.dense - plain) * small + plain * full) / job.shape.replica_gpus + part.experts * small / job.gpus


def _folder_bytes(folder: Path) -> int:
    """Bytes of the safetensors files in a model folder."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))
