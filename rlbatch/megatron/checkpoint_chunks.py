"""Finds which part of which checkpoint tensor a rank holds: of its own model, or of any layout's without ranks, on the meta device.

Either answer comes from Megatron's ``sharded_state_dict``; without ranks a process simulates one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories, is_main_replica

from rlbatch.api import ModelFamily
from rlbatch.config.schema import LayoutConfig
from rlbatch.megatron import parallel
from rlbatch.megatron.names import canonical_tensors
from rlbatch.megatron.simulated_rank import on_meta, simulated_rank, stages


@dataclass(frozen=True)
class ParameterChunk:
    """A box of one of a rank's parameters, and its place in the checkpoint.

    Attributes:
        name: Canonical name of the parameter.
        shape: Of the parameter on this rank.
        start: Of the box in the parameter.
        size: Of the box.
        key: Of the checkpoint's tensor.
        global_shape: Of the checkpoint's tensor: the parameter's dimensions, perhaps behind one for the layer.
        global_start: Of the box in the checkpoint's tensor.
        is_padded: Whether another layout's tensor may have more or fewer rows, which are filled up for tensor parallelism.
    """

    name: str
    shape: tuple[int, ...]
    start: tuple[int, ...]
    size: tuple[int, ...]
    key: str
    global_shape: tuple[int, ...]
    global_start: tuple[int, ...]
    is_padded: bool = False


@dataclass(frozen=True)
class RankChunks:
    """What a rank writes into a checkpoint.

    Attributes:
        rank: The rank.
        tp: Tensor-parallel size and rank.
        etp: The same of experts.
        ep: Expert-parallel size and rank.
        chunks: In the model's order; none that another rank writes.
    """

    rank: int
    tp: tuple[int, int]
    etp: tuple[int, int]
    ep: tuple[int, int]
    chunks: tuple[ParameterChunk, ...]


def rank_chunks(family: ModelFamily, layout: LayoutConfig) -> Iterator[RankChunks]:
    """Simulates the ranks of a layout, one after the other. No process group may exist.

    Args:
        family: The model.
        layout: Already checked.
    """
    for rank in range(layout.world_size):
        with simulated_rank(layout, rank):
            chunks = tuple(_chunks(family, layout)) if _may_write() else ()
            groups = parallel.weight_groups()
            yield RankChunks(rank, _place(groups.tp), _place(groups.etp), _place(groups.ep), chunks)


def _place(group: dist.ProcessGroup) -> tuple[int, int]:
    return group.size(), group.rank()


def _may_write() -> bool:
    """Whether this rank is the first of its replicas, of dense parameters or of experts."""
    return parallel.dp_cp_group().rank() == 0 or parallel_state.get_expert_data_parallel_group().rank() == 0


def _chunks(family: ModelFamily, layout: LayoutConfig) -> Iterator[ParameterChunk]:
    with on_meta():
        for stage in stages(family, layout):
            yield from (chunk for _, chunk, replica in placed_chunks(stage) if is_main_replica(replica))


def placed_chunks(stage: Any) -> Iterator[tuple[torch.Tensor, ParameterChunk, tuple[int, ...]]]:
    """The chunks of a model chunk's parameters and buffers, each with the whole tensor and Megatron's number of this copy of it: of its
    pipeline stage, tensor-parallel and data-parallel rank, as far as these hold the same.
    """
    names = {id(tensor): name for name, tensor in canonical_tensors([stage]).items()}
    tensors, state = stage.state_dict(keep_vars=True), stage.sharded_state_dict(metadata=sharding_metadata())
    apply_factories(state)
    for name, value in state.items():
        for sharded in value if isinstance(value, list) else [value]:
            if isinstance(sharded, ShardedTensor):
                yield tensors[name], _chunk(names[id(tensors[name])], tensors[name], sharded), sharded.replica_id


def sharding_metadata() -> dict[str, Any]:
    """How Megatron names and splits what it saves; the same for every checkpoint that rlbatch reads or writes."""
    return {"dp_cp_group": parallel.dp_cp_group(), "singleton_local_shards": False}


def _chunk(name: str, parameter: torch.Tensor, sharded: ShardedTensor) -> ParameterChunk:
    offset, start = sharded.data.storage_offset() - parameter.storage_offset(), []
    for stride in parameter.stride():
        start.append(offset // stride)
        offset %= stride
    return ParameterChunk(
        name=name,
        shape=tuple(parameter.shape),
        start=tuple(start),
        size=tuple(sharded.data.shape),
        key=sharded.key,
        global_shape=tuple(sharded.global_shape),
        global_start=tuple(sharded.global_offset),
        is_padded=sharded.allow_shape_mismatch,
    )
