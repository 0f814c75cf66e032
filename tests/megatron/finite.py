"""Updates whose gradients, weights or state are not finite on one rank, as each rank of a pool sees them."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from rlbatch.algorithms.objective import Objective
from rlbatch.api import DataError, ModelError
from rlbatch.config.schema import AlgorithmConfig, LayoutConfig
from rlbatch.megatron.checkpoint import TrainerState, load_state
from rlbatch.megatron.finite import NotFinite
from rlbatch.megatron.trainer import Trainer
from rlbatch.pipeline.bare_trainer import build_trainer
from rlbatch.registry import load_plugins
from rlbatch.testing.gradients import my_packs

DENOMINATOR = 50.0


def update(trainer: Trainer, layout: LayoutConfig) -> str:
    """One update of the test batch; what was not finite, or the class of the error and its message, or nothing."""
    batches = [pack.microbatch for pack in my_packs(layout, 40)]
    for batch, old in zip(batches, trainer.logprobs(batches), strict=True):
        batch.old_logprobs = old
    try:
        trainer.update(batches, Objective(AlgorithmConfig(), load_plugins().build_loss(AlgorithmConfig())), DENOMINATOR)
    except NotFinite as error:
        return error.found
    except ModelError as error:
        return str(error)
    return ""


def poisoned(folder: str, layout: LayoutConfig, name: str, rank: int, value: float) -> tuple[str, bool, str]:
    """An update in whose backward pass one value of a parameter's gradient is replaced on one rank.

    Returns:
        What was not finite, whether weights and optimizer stayed bitwise as they were, and the same of an update after it.
    """
    trainer = build_trainer(Path(folder), layout)

    def poison(_: torch.Tensor) -> None:  # what comes here is not the gradient of a head, which is added where it stays
        trainer.params[name].main_grad.view(-1)[-1] = value

    before = {key: tensor.detach().clone() for key, tensor in trainer.params.items()}
    hook = trainer.params[name].register_hook(poison) if dist.get_rank() == rank else None
    assert hook is not None or dist.get_rank() != rank
    found = update(trainer, layout)
    is_same = all(torch.equal(tensor, before[key]) for key, tensor in trainer.params.items()) and trainer.policy_version == 0
    is_same = is_same and not any(optimizer.optimizer.state for optimizer in trainer.optimizer.chained_optimizers)
    if hook is not None:
        hook.remove()
    return found, is_same, update(trainer, layout)


def overflowing(folder: str, layout: LayoutConfig, lr: float) -> tuple[str, str]:
    """Two updates with a learning rate."""
    trainer = build_trainer(Path(folder), layout)
    for group in trainer.optimizer.param_groups:
        group["lr"] = lr
    return update(trainer, layout), update(trainer, layout)


def spoiled_state(folder: str, layout: LayoutConfig, name: str, what: str, target: str) -> str:
    """What is said of a checkpoint in whose optimizer one value of a parameter, on its first rank, is infinite."""
    trainer = build_trainer(Path(folder), layout)
    update(trainer, layout)
    mine = [value for key, kind, value, _ in trainer._finite._state() if (key, kind) == (name, what) and value.numel()]
    if mine:
        mine[0].view(-1)[-1] = torch.inf
    TrainerState(trainer).write(Path(target))
    try:
        load_state(build_trainer(Path(folder), layout), Path(target))
    except DataError as error:
        return str(error)
    return ""
