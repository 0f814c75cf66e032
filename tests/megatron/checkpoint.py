"""Updates, a save and a load of a four-layer model on the ranks of a pool, for any layout: what the checkpoint tests run."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from rlbatch.algorithms.aggregate import denominator
from rlbatch.algorithms.objective import Objective
from rlbatch.config.schema import AlgorithmConfig, LayoutConfig
from rlbatch.megatron import held_parts, parallel, state_writer
from rlbatch.megatron.checkpoint import TrainerState, load_state
from rlbatch.megatron.trainer import Trainer
from rlbatch.pipeline.bare_trainer import build_trainer, plugins_of
from rlbatch.testing.gradients import my_packs

RATE = 1e-3


def update(trainer: Trainer, layout: LayoutConfig) -> dict[str, float]:
    """One optimizer step on the test batch, at a rate that moves the weights far more than rounding does."""
    objective = Objective(AlgorithmConfig(), plugins_of().build_loss(AlgorithmConfig()))
    batches = [pack.microbatch for pack in my_packs(layout, 40)]
    for batch, old in zip(batches, trainer.logprobs(batches), strict=True):
        batch.old_logprobs = old
    total = torch.tensor(sum(denominator(b.loss_mask, b.cu_seqlens, "token_mean") for b in batches))
    dist.all_reduce(total, group=parallel.dp_group())
    for group in trainer.optimizer.param_groups:
        group["lr"] = RATE
    return trainer.update(batches, objective, float(total))


def exported(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Full tensors by Hugging Face name; rank 0 only."""
    named = {name: tensor.clone() for name, tensor in trainer.export()}
    return named if dist.get_rank() == 0 else {}


def save_between_updates(folder: str, layout: LayoutConfig, state: str) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Three updates, saving after the second, in many small parts and files; the weights after the third and what it reported."""
    trainer = build_trainer(Path(folder), layout)
    update(trainer, layout)
    update(trainer, layout)
    if dist.get_rank() == 0:
        Path(state).mkdir()
    dist.barrier()
    with mock.patch.object(held_parts, "PART_BYTES", 2**12), mock.patch.object(state_writer, "FILE_BYTES", 2**16):
        TrainerState(trainer).write(Path(state))
    last = update(trainer, layout)
    return exported(trainer), last


def load_and_update(folder: str, layout: LayoutConfig, state: str) -> tuple[dict[str, torch.Tensor], dict[str, float], set[float]]:
    """The third update after a load: weights, report, and Adam's step counts of this rank."""
    trainer = build_trainer(Path(folder), layout)
    load_state(trainer, Path(state))
    last = update(trainer, layout)
    states = [s for optimizer in trainer.optimizer.chained_optimizers for s in optimizer.optimizer.state.values()]
    return exported(trainer), last, {float(s["step"]) for s in states}


def first_update(folder: str, layout: LayoutConfig) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """One update from the folder's weights."""
    trainer = build_trainer(Path(folder), layout)
    report = update(trainer, layout)
    return exported(trainer), report
