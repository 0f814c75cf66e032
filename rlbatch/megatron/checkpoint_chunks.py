"""Finds which part of which checkpoint tensor a rank of a layout holds, without ranks: its model is built on the meta device.

The answer comes from the same ``sharded_state_dict`` as training's, in a process that simulates one rank after the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories, is_main_replica

from rlbatch.api import ModelFamily
from rlbatch.config.schema import LayoutConfig
from rlbatch.megatron import parallel
from rlbatch.megatron.checkpoint import sharding_metadata
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
    """

    name: str
    shape: tuple[int, ...]
    start: tuple[int, ...]
    size: tuple[int, ...]
    key: str
    global_shape: tuple[int, ...]
    global_start: tuple[int, ...]


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


def rank_chunks(family: ModelFamily, layout: LayoutConfig, ranks: Iterable[int] | None = None) -> Iterator[RankChunks]:
    """Simulates ranks of a layout, one after the other. No process group may exist.

    Args:
        family: The model.
        layout: Already checked.
        ranks: Those wanted; None: all.
    """
    for rank in range(layout.world_size) if ranks is None else ranks:
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
            names = {id(tensor): name for name, tensor in canonical_tensors([stage]).items()}
            tensors = stage.state_dict(keep_vars=True)
            state = stage.sharded_state_dict(metadata=sharding_metadata())
            apply_factories(state)
            for name, value in state.items():
                for sharded in value if isinstance(value, list) else [value]:
                    if isinstance(sharded, ShardedTensor) and is_main_replica(sharded.replica_id):
                        yield _chunk(names[id(tensors[name])], tensors[name], sharded)


def _chunk(name: str, parameter: torch.Tensor, sharded: ShardedTensor) -> ParameterChunk:
    offset, start = sharded.data.storage_offset(), []
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
    )
