"""Model and optimizer as a torch_dist checkpoint, through Megatron's distributed checkpointing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state

from rlbatch.megatron.trainer import Trainer


def save_state(trainer: Trainer, folder: Path) -> None:
    """Writes weights, moments and step counts; a collective.

    Args:
        trainer: Whose.
        folder: Existing and empty.
    """
    dist_checkpointing.save(_sharded_state(trainer, is_loading=False), str(folder))


def load_state(trainer: Trainer, folder: Path) -> None:
    """Reads what ``save_state`` wrote, under the same layout or another; a collective.

    Args:
        trainer: Whose state is replaced.
        folder: Of ``save_state``.
    """
    for optimizer in trainer.optimizer.chained_optimizers:
        optimizer._init_optimizer_states_with_dummy_values()  # torch's Adam has no moments to fill before its first step
    loaded = dist_checkpointing.load(_sharded_state(trainer, is_loading=True), str(folder))
    with torch.no_grad():
        for index, stage in enumerate(trainer.stages):
            stage.load_state_dict(loaded[f"model{index}"], strict=True)
    trainer.optimizer.load_state_dict(loaded["optimizer"])


def _sharded_state(trainer: Trainer, *, is_loading: bool) -> dict[str, Any]:
    metadata = {
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": False,
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
    }
    state: dict[str, Any] = {f"model{index}": stage.sharded_state_dict(metadata=metadata) for index, stage in enumerate(trainer.stages)}
    state["optimizer"] = trainer.optimizer.sharded_state_dict(dict(state), is_loading, metadata=metadata)
    return state
