"""Updates with and without offload strategies in between, on every rank of a pool."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from rlbatch.algorithms.aggregate import denominator
from rlbatch.algorithms.objective import Objective
from rlbatch.api import OffloadStrategy
from rlbatch.checkpoint.hf import HfTensors
from rlbatch.config.hf_config import read_config
from rlbatch.config.schema import AlgorithmConfig, Config, LayoutConfig, OptimizerConfig, TrainConfig
from rlbatch.megatron import activation_offload, parallel
from rlbatch.megatron.trainer import Trainer
from rlbatch.registry import load_plugins
from rlbatch.testing.gradients import my_packs

UPDATES = 3


@dataclass
class Updates:
    """What this rank has after some updates.

    Attributes:
        sums: Of each update.
        logprobs: Before each update.
        tensors: Weights and optimizer state at the end.
        held: Bytes of gradients: after the start, before and after each update, and while released.
        staying: Bytes of weights, and of optimizer state, while an engine would generate.
        left: How often each activation is still wanted at the end.
        host: Bytes of host memory that were taken, and of weights and of optimizer state, each tensor from a multiple of 16 on.
    """

    sums: list[dict[str, float]]
    logprobs: list[torch.Tensor]
    tensors: list[torch.Tensor]
    held: list[tuple[str, int]]
    staying: list[tuple[int, int]]
    left: list[int] = field(default_factory=list)
    host: tuple[int, int, int] = (0, 0, 0)


def trainer_of(
    folder: str, layout: LayoutConfig, precision: str, offload: str, options: dict[str, Any] | None = None
) -> tuple[Trainer, OffloadStrategy]:
    """A trainer with the folder's weights, and its offload strategy."""
    parallel.initialize_groups(layout, seed=0)
    registry = load_plugins()
    strategy = registry.build_offload(offload, options or {})
    config = Config(layout=layout, train=TrainConfig(precision=precision), optimizer=OptimizerConfig(lr=1e-2, weight_decay=0.1))
    trainer = Trainer(config, registry.resolve_model_family(read_config(Path(folder))), strategy)
    trainer.load(HfTensors(Path(folder)).read)
    return trainer, strategy


def updated(folder: str, layout: LayoutConfig, precision: str, offload: str, options: dict[str, Any] | None = None) -> Updates:
    """Some updates under an offload strategy, with a phase of generation before each."""
    trainer, strategy = trainer_of(folder, layout, precision, offload, options)
    result = Updates([], [], [], [("start", trainer.gradient_bytes)], [])
    objective = Objective(AlgorithmConfig(), load_plugins().build_loss(AlgorithmConfig()))
    batches = [pack.microbatch for pack in my_packs(layout, 40)]
    total = torch.tensor(sum(denominator(b.loss_mask, b.cu_seqlens, "token_mean") for b in batches))
    torch.distributed.all_reduce(total, group=parallel.dp_group())
    for _ in range(UPDATES):
        with strategy.generating():
            result.held.append(("generating", trainer.gradient_bytes))
            strategy.sync_begins()
            for _ in trainer.export():
                pass
            strategy.sync_ends()
            parts = (trainer.weights(), trainer.optimizer_state())
            weights, state = (sum(tensor.untyped_storage().nbytes() for tensor in part) for part in parts)
            result.staying.append((weights, state))
        with strategy.training():
            old = trainer.logprobs(batches)
            result.held.append(("logprobs", trainer.gradient_bytes))
            for batch, values in zip(batches, old, strict=True):
                batch.old_logprobs = values
            trainer.next_learning_rate()
            for _ in range(2):
                result.sums.append(trainer.update(batches, objective, float(total)))
                result.held.append(("updated", trainer.gradient_bytes))
        result.logprobs += old
    weights, state = (sum(-(-tensor.nbytes // 16) * 16 for tensor in part) for part in (trainer.weights(), trainer.optimizer_state()))
    result.host = (trainer.host_bytes, weights, state)
    if trainer._activations is not None:
        result.left = [saved.uses for forward in trainer._activations._held for saved in forward.saved.values()]
    result.tensors = [tensor.detach().clone() for tensor in (*trainer.params.values(), *trainer.optimizer_state())]
    return result


def compared(folder: str, layout: LayoutConfig, precision: str) -> tuple[list[str], dict[str, set[int]], dict[str, set[int]]]:
    """What differs at all between releasing and not, and the bytes held by phase with and without."""
    kept, released = (updated(folder, layout, precision, offload) for offload in ("none", "gradients"))
    return _differing(kept, released), _by_phase(released), _by_phase(kept)


def moved(
    folder: str, layout: LayoutConfig, precision: str, strategies: list[tuple[str, dict[str, Any]]]
) -> list[tuple[list[str], list[tuple[int, int]], tuple[int, int, int]]]:
    """Of each strategy what differs at all from ``none``, the bytes that stay in each generation, and the host's."""
    kept, *others = (updated(folder, layout, precision, *strategy) for strategy in (("none", {}), *strategies))
    return [(_differing(kept, other), other.staying, other.host) for other in (kept, *others)]


def activations_moved(folder: str, layout: LayoutConfig, precision: str) -> tuple[list[str], int, list[int]]:
    """What differs at all from activations that stay; bytes of host memory, and ``Updates.left``."""
    least, activation_offload.LEAST = activation_offload.LEAST, 1
    try:
        kept, moved = (updated(folder, each, precision, "none") for each in (replace(layout, offload_modules=()), layout))
    finally:
        activation_offload.LEAST = least
    return _differing(kept, moved), moved.host[0], moved.left


def _differing(kept: Updates, released: Updates) -> list[str]:
    differing = [f"sums {i}" for i, pair in enumerate(zip(kept.sums, released.sums, strict=True)) if pair[0] != pair[1]]
    for name in ("logprobs", "tensors"):
        pairs = enumerate(zip(getattr(kept, name), getattr(released, name), strict=True))
        differing += [f"{name} {i}" for i, (a, b) in pairs if not torch.equal(a, b)]
    return differing


def _by_phase(updates: Updates) -> dict[str, set[int]]:
    return {phase: {num_bytes for name, num_bytes in updates.held if name == phase} for phase, _ in updates.held}


def exported_after_release(folder: str) -> tuple[float, float]:
    """Sum of absolute gradients after a backward pass, and once they were released."""
    layout = LayoutConfig(world_size=1)
    trainer, _ = trainer_of(folder, layout, "fp32", "none")
    batches = [pack.microbatch for pack in my_packs(layout, 1000)]
    for batch, values in zip(batches, trainer.logprobs(batches), strict=True):
        batch.old_logprobs = values
    trainer.backward(batches, Objective(AlgorithmConfig(), load_plugins().build_loss(AlgorithmConfig())), 1.0)
    before = sum(float(gradient.abs().sum()) for _, gradient in trainer.export_gradients())
    trainer.release_gradients()
    trainer.release_gradients()
    return before, sum(float(gradient.abs().sum()) for _, gradient in trainer.export_gradients())
