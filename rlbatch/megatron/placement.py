"""Which part of which checkpoint tensor a rank of a layout holds, found without ranks: its model is built on the meta device.

The answer comes from the same ``sharded_state_dict`` as training's, in a process that plays one rank after the other.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories, is_main_replica
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

from rlbatch.api import ModelFamily
from rlbatch.config.schema import LayoutConfig
from rlbatch.megatron import parallel
from rlbatch.megatron.checkpoint import sharding_metadata
from rlbatch.megatron.model import build_model, transformer_config
from rlbatch.megatron.names import canonical_tensors


@dataclass(frozen=True)
class Piece:
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
class Placement:
    """What a rank writes into a checkpoint.

    Attributes:
        rank: The rank.
        tp: Tensor-parallel size and rank.
        etp: The same of experts.
        ep: Expert-parallel size and rank.
        pieces: In the model's order; none that another rank writes.
    """

    rank: int
    tp: tuple[int, int]
    etp: tuple[int, int]
    ep: tuple[int, int]
    pieces: tuple[Piece, ...]


def placements(family: ModelFamily, layout: LayoutConfig, ranks: Iterable[int] | None = None) -> Iterator[Placement]:
    """Plays ranks of a layout. No process group may exist.

    Args:
        family: The model.
        layout: Already checked.
        ranks: Those wanted; None: all.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    for rank in range(layout.world_size) if ranks is None else ranks:
        dist.init_process_group("fake", rank=rank, world_size=layout.world_size, store=FakeStore())
        try:
            parallel.initialize_groups(layout, seed=0)
            pieces = tuple(_pieces(family, layout)) if _may_write() else ()
            groups = parallel.weight_groups()
            yield Placement(rank, _place(groups.tp), _place(groups.etp), _place(groups.ep), pieces)
        finally:
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()


def _place(group: dist.ProcessGroup) -> tuple[int, int]:
    return group.size(), group.rank()


def _may_write() -> bool:
    """Whether this rank is the first of its replicas, of dense parameters or of experts."""
    return parallel.dp_cp_group().rank() == 0 or parallel_state.get_expert_data_parallel_group().rank() == 0


class _OnMeta(TorchFunctionMode):
    """Every new tensor is on the meta device, also where a device is named."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if function in _device_constructors():
            kwargs["device"] = "meta"
        return function(*args, **kwargs)


def _pieces(family: ModelFamily, layout: LayoutConfig) -> Iterator[Piece]:
    with _OnMeta(), contextlib.redirect_stdout(None), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stages = build_model(transformer_config(family, layout, "bf16"), family)
        for stage in stages:
            names = {id(tensor): name for name, tensor in canonical_tensors([stage]).items()}
            tensors = stage.state_dict(keep_vars=True)
            state = stage.sharded_state_dict(metadata=sharding_metadata())
            apply_factories(state)
            for name, value in state.items():
                for sharded in value if isinstance(value, list) else [value]:
                    if isinstance(sharded, ShardedTensor) and is_main_replica(sharded.replica_id):
                        yield _piece(names[id(tensors[name])], tensors[name], sharded)


def _piece(name: str, parameter: torch.Tensor, sharded: ShardedTensor) -> Piece:
    offset, start = sharded.data.storage_offset(), []
    for stride in parameter.stride():
        start.append(offset // stride)
        offset %= stride
    return Piece(
        name=name,
        shape=tuple(parameter.shape),
        start=tuple(start),
        size=tuple(sharded.data.shape),
        key=sharded.key,
        global_shape=tuple(sharded.global_shape),
        global_start=tuple(sharded.global_offset),
    )
