"""A trainer without a run, for comparisons: a folder's weights on the ranks of a layout, and one GRPO backward pass."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, cast

import torch
import torch.distributed as dist

from rlbatch.algorithms.aggregate import denominator
from rlbatch.algorithms.objective import Objective
from rlbatch.checkpoint.hf import HfTensors
from rlbatch.config.hf_config import read_config
from rlbatch.config.schema import AlgorithmConfig, Config, CorrectionConfig, LayoutConfig, TrainConfig
from rlbatch.megatron import parallel
from rlbatch.megatron.trainer import Trainer
from rlbatch.pipeline.correction_totals import with_kept_ratio
from rlbatch.pipeline.packing import Pack
from rlbatch.registry import Registry, load_plugins


@lru_cache(maxsize=4)
def plugins_of(names: tuple[str, ...] = ()) -> Registry:
    """The installed plugins, with those named as in ``plugins=[...]``."""
    return load_plugins(names)


def build_trainer(
    folder: Path, layout: LayoutConfig, plugins: tuple[str, ...] = (), algorithm: AlgorithmConfig | None = None, **train: Any
) -> Trainer:
    """A trainer on this rank with the folder's weights."""
    config = Config(layout=layout, train=TrainConfig(**train), algorithm=algorithm or AlgorithmConfig())
    parallel.initialize_groups(layout, seed=0)
    registry = plugins_of(plugins)
    trainer = Trainer(config, registry.resolve_model_family(read_config(folder)), registry.build_offload("none", {}))
    trainer.load(HfTensors(folder).read)
    return trainer


def backward(
    trainer: Trainer,
    packs: list[Pack],
    aggregation: str,
    loss: str = "clip",
    options: Mapping[str, Any] = MappingProxyType({}),
    correction: CorrectionConfig | None = None,
    old: Literal["moved", "before", "own"] = "moved",
) -> float:
    """Runs one backward pass, which leaves its gradients in the trainer, and returns the loss.

    With ``old`` ``moved``, old log-probs are those of a slightly different policy; with ``before``, the trainer's by a pass before the
    update; with ``own``, the update's own.
    """
    algorithm = AlgorithmConfig(
        loss=loss, loss_aggregation=cast(Any, aggregation), loss_options=options, kl_loss=True, kl_loss_coef=0.3, entropy_coef=0.1
    )
    objective = Objective(algorithm, plugins_of().build_loss(algorithm), correction or CorrectionConfig())
    batches = [pack.microbatch for pack in packs]
    for batch, values in zip(batches, trainer.logprobs(batches), strict=True):
        before = values - 0.05 * batch.loss_mask if old == "moved" else values
        batch.old_logprobs = None if old == "own" else before
        batch.ref_logprobs, batch.rollout_logprobs = 0.9 * values, 0.95 * values
        if correction is not None:
            batch.rollout_logprobs = before + 0.4 * (3.0 * batch.token_ids + 1.0).sin() * batch.loss_mask
    objective = with_kept_ratio(objective, batches)
    total = torch.tensor(sum(denominator(b.loss_mask, b.cu_seqlens, aggregation, 7.0) for b in batches))
    dist.all_reduce(total, group=parallel.dp_group())
    return float(trainer.backward(batches, objective, float(total))["loss"])


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """L2 norm of the difference, divided by that of ``want``."""
    return float((got - want).norm() / want.norm().clamp(min=1e-12))
