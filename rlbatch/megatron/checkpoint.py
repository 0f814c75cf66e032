"""Model and optimizer as a torch_dist checkpoint, through Megatron's distributed checkpointing; written at once, or by a child process."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories, is_main_replica
from megatron.core.dist_checkpointing.strategies import torch as strategies
from megatron.core.dist_checkpointing.strategies.cached_metadata_filesystem_reader import CachedMetadataFileSystemReader
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from rlbatch.api import DataError
from rlbatch.checkpoint.unpickle import read_metadata
from rlbatch.megatron.policy import Policy
from rlbatch.megatron.state_writer import Writing
from rlbatch.megatron.trainer import Trainer

TENSOR_OVERHEAD_BYTES = 4096
"""Most that a tensor costs on disk beyond its values: its archive's headers and its entry in the metadata."""


class TrainerState:
    """Weights, main weights, moments and step counts of a trainer, ready to be written. Building it is a collective.

    The distributed optimizer's parts are gathered to the host, for each data-parallel group whole: the checkpoint then loads under any
    layout.

    Attributes:
        write_bytes: What this rank will write.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._state = _sharded_state(trainer, is_loading=False)
        apply_factories(self._state)
        mine = [v for v in nested_values(self._state) if isinstance(v, ShardedTensor) and is_main_replica(v.replica_id)]
        self.write_bytes = sum(tensor.data.nbytes + TENSOR_OVERHEAD_BYTES for tensor in mine)

    def write(self, folder: Path) -> None:
        """Writes the state, and returns when every rank has; a collective.

        Args:
            folder: Existing and empty, seen by all ranks.

        Raises:
            CheckpointError: a rank could not write; on every rank.
        """
        self._writing(folder).run_here()

    def start_writing(self, folder: Path) -> Writing:
        """Begins to write the state as it is now from a child process of each rank; a collective."""
        writing = self._writing(folder)
        writing.start()
        return writing

    def _writing(self, folder: Path) -> Writing:
        return Writing(dist_checkpointing.save(self._state, str(folder), async_sharded_save=True))


def load_state(trainer: Trainer, folder: Path) -> None:
    """Reads what ``TrainerState`` wrote, under the same layout or another; a collective.

    Learning rate, weight decay and betas stay those of the config; the schedule sets the rate anew.

    Args:
        trainer: Whose state is replaced.
        folder: Of a checkpoint's state.

    Raises:
        DataError: the state cannot be read, or has values that are infinite or NaN.
    """
    inner = [optimizer.optimizer for optimizer in trainer.optimizer.chained_optimizers]
    kept = [[{k: v for k, v in group.items() if k not in ("params", "step")} for group in o.param_groups] for o in inner]
    for optimizer in trainer.optimizer.chained_optimizers:
        optimizer._init_optimizer_states_with_dummy_values()  # torch's Adam has no moments to fill before its first step
    with _reading(folder):
        loaded = dist_checkpointing.load(_sharded_state(trainer, is_loading=True), str(folder))
    _fill_stages(trainer, loaded)
    trainer.optimizer.load_state_dict(loaded["optimizer"])
    for optimizer, groups in zip(inner, kept, strict=True):
        for group, values in zip(optimizer.param_groups, groups, strict=True):
            group.update(values)
        for state in optimizer.state.values():
            if torch.is_tensor(state.get("step")):
                # Megatron gives all parameters one tensor, which every parameter's update would then count up.
                state["step"] = state["step"].clone()
    if broken := trainer.not_finite(with_optimizer=True):
        raise DataError(f"{folder}: has what is infinite or NaN: {broken}. Name an earlier checkpoint in latest.json.")


def load_weights(trainer: Policy, folder: Path) -> None:
    """Reads the weights alone; a collective.

    Args:
        trainer: Whose weights are replaced.
        folder: As for ``load_state``.

    Raises:
        DataError: the state cannot be read.
    """
    with _reading(folder):
        loaded = dist_checkpointing.load(_sharded_weights(trainer), str(folder))
    _fill_stages(trainer, loaded)
    trainer.weights_changed()


@contextmanager
def _reading(folder: Path) -> Iterator[None]:
    try:
        yield
    except (CheckpointException, CheckpointingException, OSError, EOFError, pickle.UnpicklingError) as error:
        causes = [str(cause) for cause, _ in error.failures.values()] if isinstance(error, CheckpointException) else [str(error)]
        text = (causes or ["another rank failed"])[0].strip().splitlines()[0]
        if text.startswith("Weights only load failed"):  # torch goes on to advise how to run it
            text = "a file is damaged, or holds more than tensors and plain values; nothing of it was run"
        raise DataError(f"{folder}: cannot be read ({text}). Name another checkpoint in latest.json, or restore the folder.") from error


def _fill_stages(trainer: Policy, loaded: dict[str, Any]) -> None:
    with torch.no_grad():
        for index, stage in enumerate(trainer.stages):
            stage.load_state_dict(loaded[f"model{index}"], strict=True)


def _sharded_weights(trainer: Policy) -> dict[str, Any]:
    return {f"model{index}": stage.sharded_state_dict(metadata=sharding_metadata()) for index, stage in enumerate(trainer.stages)}


def _sharded_state(trainer: Trainer, *, is_loading: bool) -> dict[str, Any]:
    state = _sharded_weights(trainer)
    state["optimizer"] = trainer.optimizer.sharded_state_dict(dict(state), is_loading, metadata=sharding_metadata())
    return state


def sharding_metadata() -> dict[str, Any]:
    """How Megatron names and splits what it saves; the same for every checkpoint that rlbatch reads or writes."""
    return {
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": False,
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
    }


class _Reader(CachedMetadataFileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._cached_metadata is None:
            self._cached_metadata = read_metadata(Path(self.path))
            self._cached_metadata.storage_meta = self._cached_metadata.storage_meta or StorageMeta()
            self._cached_metadata.storage_meta.load_id = self.load_id
        return self._cached_metadata


class _Planner(strategies.MCoreLoadPlanner):
    def load_bytes(self, read_item: Any, value: Any) -> None:
        loaded = torch.load(value, weights_only=True)
        if self.flatten_state_dict:
            set_element(self.original_state_dict, self.mappings[read_item.dest_index.fqn], loaded)
        else:
            self.state_dict[read_item.dest_index.fqn] = loaded


strategies._get_filesystem_reader = lambda checkpoint_dir, cache_metadata=False: _Reader(checkpoint_dir)
strategies.MCoreLoadPlanner = _Planner
