"""Finds the part of each checkpoint tensor that a rank holds, of its own model or of any layout's.

The parts come from Megatron's ``sharded_state_dict``. For another layout a process simulates its ranks one after the other, on the meta
device.
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
        shape: Shape of the parameter on this rank.
        start: First index of the box in the parameter.
        size: Size of the box.
        key: Name of the checkpoint's tensor.
        global_shape: Shape of the checkpoint's tensor: the parameter's dimensions, perhaps behind one for the layer.
        global_start: First index of the box in the checkpoint's tensor.
        is_padded: Whether another layout's tensor may have more or fewer rows, because of padding for tensor parallelism.
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
    """The chunks that a rank writes into a checkpoint.

    Attributes:
        rank: Number of the rank.
        tp: Tensor-parallel size and rank.
        etp: Expert-tensor-parallel size and rank.
        ep: Expert-parallel size and rank.
        chunks: Chunks in the model's order, without those that another rank writes.
    """

    rank: int
    tp: tuple[int, int]
    etp: tuple[int, int]
    ep: tuple[int, int]
    chunks: tuple[ParameterChunk, ...]


def rank_chunks(family: ModelFamily, layout: LayoutConfig) -> Iterator[RankChunks]:
    """Yields the chunks of each rank of a layout, simulated one after the other. No process group may exist.

    Args:
        family: Family of the model.
        layout: Layout that was checked.
    """
    for rank in range(layout.world_size):
        with simulated_rank(layout, rank):
            chunks = tuple(_chunks(family, layout)) if _may_write() else ()
            groups = parallel.weight_groups()
            yield RankChunks(rank, _place(groups.tp), _place(groups.etp), _place(groups.ep), chunks)


def _place(group: dist.ProcessGroup) -> tuple[int, int]:
    return group.size(), group.rank()


def _may_write() -> bool:
    """Whether this rank is the first of its replicas, for dense parameters or for experts."""
    return parallel.dp_cp_group().rank() == 0 or parallel_state.get_expert_data_parallel_group().rank() == 0


def _chunks(family: ModelFamily, layout: LayoutConfig) -> Iterator[ParameterChunk]:
    with on_meta():
        for stage in stages(family, layout):
            yield from (chunk for _, chunk, replica in placed_chunks(stage) if is_main_replica(replica))


def placed_chunks(stage: Any) -> Iterator[tuple[torch.Tensor, ParameterChunk, tuple[int, ...]]]:
    """Yields the chunks of a model chunk's parameters and buffers, each with the whole tensor and its replica id.

    Megatron's replica id numbers the copies of the tensor by pipeline stage, tensor-parallel and data-parallel rank.
    """
    names = {id(tensor): name for name, tensor in canonical_tensors([stage]).items()}
    tensors, state = stage.state_dict(keep_vars=True), stage.sharded_state_dict(metadata=sharding_metadata())
    apply_factories(state)
    for name, value in state.items():
        for sharded in value if isinstance(value, list) else [value]:
            if isinstance(sharded, ShardedTensor):
                yield tensors[name], _chunk(names[id(tensors[name])], tensors[name], sharded), sharded.replica_id


def sharding_metadata() -> dict[str, Any]:
    """Metadata with which Megatron names and splits what it saves, equal for every checkpoint that rlbatch reads or writes."""
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
