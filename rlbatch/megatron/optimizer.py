"""Builds Megatron's distributed optimizer and its learning-rate schedule from our config keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor

from rlbatch.api import OptimizerSpec
from rlbatch.config.schema import OptimizerConfig
from rlbatch.megatron.model import DTYPES
from rlbatch.megatron.parallel import end_with_groups

BUCKET_SIZE: int | None = None
"""Parameters in a bucket, which is reduced at once if overlapped; None: Megatron's 40 million, or a million a data-parallel rank."""


def wrap_data_parallel(config: Any, chunks: list[Any], *, overlap: bool) -> list[DistributedDataParallel]:
    """Wraps model chunks with fp32 gradient buffers, which are reduce-scattered over data-parallel ranks for the distributed optimizer.

    Args:
        config: Megatron's config of all chunks.
        chunks: Model chunks of this rank's stage.
        overlap: Whether each bucket is reduced as soon as the last microbatch's backward pass has filled it.
    """
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=True, overlap_grad_reduce=overlap, bucket_size=BUCKET_SIZE
    )
    wrapped = [DistributedDataParallel(config, ddp_config, chunk, disable_bucketing=index > 0) for index, chunk in enumerate(chunks)]
    end_with_groups(wrapped)
    if overlap:  # the schedule tells the buckets which microbatch is the last
        config.no_sync_func = wrapped[0].no_sync if len(wrapped) == 1 else [chunk.no_sync for chunk in wrapped]
    return wrapped


def optimizer_spec(config: OptimizerConfig, precision: str) -> OptimizerSpec:
    """Arguments for Megatron's ``OptimizerConfig``, which the offload strategy may still change."""
    return OptimizerSpec(
        {
            "optimizer": config.name,
            "lr": config.lr,
            "min_lr": config.min_lr,
            "weight_decay": config.weight_decay,
            "adam_beta1": config.beta1,
            "adam_beta2": config.beta2,
            "adam_eps": config.eps,
            "clip_grad": config.clip_grad,
            "bf16": precision == "bf16",
            "params_dtype": DTYPES[precision],
            "use_distributed_optimizer": True,
        }
    )


def build_optimizer(spec: OptimizerSpec, chunks: list[DistributedDataParallel]) -> MegatronOptimizer:
    """Builds the distributed optimizer: one for dense parameters and one for experts, chained."""
    return get_megatron_optimizer(MegatronOptimizerConfig(**spec.arguments), chunks, use_gloo_process_groups=False)


def build_schedule(optimizer: MegatronOptimizer, config: OptimizerConfig, steps: int) -> OptimizerParamScheduler:
    """Builds the learning rate's schedule, in steps: linear warm-up from 0, then a decay to ``min_lr`` one step after the last."""
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=config.lr,
        min_lr=config.min_lr,
        lr_warmup_steps=config.lr_warmup_steps,
        lr_decay_steps=max(steps, config.lr_warmup_steps) + 1,
        lr_decay_style=config.lr_schedule,
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )


def held_state(optimizer: Any) -> Iterator[Tensor]:
    """Main weights, then moments and step counts of a rank, on any device; some may come twice."""
    for one in optimizer.chained_optimizers:
        for group in one.shard_fp32_from_float16_groups:
            yield from (main for main in group if main is not None)
        yield from getattr(one.optimizer, "param_to_fp32_param", {}).values()  # of HybridDeviceOptimizer, which has its main weights itself
    for one in optimizer.chained_optimizers:
        for part in getattr(one.optimizer, "sub_optimizers", [one.optimizer]):
            for state in part.state.values():
                yield from (value for value in state.values() if isinstance(value, Tensor))


def host_state_bytes(optimizer: Any) -> int:
    """Size of a rank's main weights and moments on the host, and of the memory there into which gradients come, bytes."""
    storages = {value.untyped_storage()._cdata: value.untyped_storage() for value in held_state(optimizer) if not value.is_cuda}
    gradients = [getattr(one.optimizer, "gradient_memory", None) for one in optimizer.chained_optimizers]
    return sum(each.nbytes() for each in storages.values()) + sum(each.nbytes for each in gradients if each is not None)
