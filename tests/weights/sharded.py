"""A Hugging Face folder spread over ranks without Megatron's model, exported again: what runs on the ranks of tests."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlbatch.api import ModelFamily
from rlbatch.checkpoint.hf import HfTensors
from rlbatch.config.hf_config import read_config
from rlbatch.registry import load_plugins
from rlbatch.weights.codec import Geometry, hf_names, is_expert, shard_shape
from rlbatch.weights.coverage import layers_of
from rlbatch.weights.params import ParallelGroups, ParameterMap


@dataclass(frozen=True)
class Layout:
    """Degrees; what is left of the ranks of a stage are replicas. Layers are dealt out to stages in turns, as interleaved pipelines do.

    Attributes:
        node: Ranks on one, which divide those of a stage.
    """

    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    node: int = 1


_groups: dict[tuple[int, Layout], ParallelGroups] = {}


def groups_of(layout: Layout) -> ParallelGroups:
    """This rank's groups; a collective the first time."""
    world, rank = dist.get_world_size(), dist.get_rank()
    if (world, layout) not in _groups:
        stage_size = world // layout.pp
        stages = [range(stage * stage_size, (stage + 1) * stage_size) for stage in range(layout.pp)]
        tp = [ranks[first : first + layout.tp] for ranks in stages for first in range(0, stage_size, layout.tp)]
        etp = [ranks[first : first + layout.etp] for ranks in stages for first in range(0, stage_size, layout.etp)]
        per_replica = layout.ep * layout.etp
        ep = [
            ranks[first + shard : first + per_replica : layout.etp]
            for ranks in stages
            for first in range(0, stage_size, per_replica)
            for shard in range(layout.etp)
        ]
        pp = [range(first, world, stage_size) for first in range(stage_size)]
        copies = [
            range(first + shard, first + layout.node, layout.tp) for first in range(0, world, layout.node) for shard in range(layout.tp)
        ]
        lists = (tp, etp, ep, pp, *([copies] if layout.node > layout.tp else []))
        own = [_own_group(ranks, rank) for ranks in lists]
        _groups[world, layout] = ParallelGroups(*own, ranks_per_node=layout.node)
    return _groups[world, layout]


def _own_group(lists: Sequence[range], rank: int) -> Any:
    groups = [dist.new_group(list(ranks)) for ranks in lists]
    return next(group for group, ranks in zip(groups, lists, strict=True) if rank in ranks)


@lru_cache
def family_of(folder: str) -> ModelFamily:
    """Of a folder."""
    return load_plugins().resolve_model_family(read_config(Path(folder)))


@lru_cache(maxsize=1)  # several exports of the same, one after the other
def sharded(folder: str, layout: Layout, dtype: torch.dtype) -> tuple[ParameterMap, dict[str, Tensor]]:
    """The map of a layout, and this rank's parameters with the folder's values."""
    family, groups, tensors = family_of(folder), groups_of(layout), HfTensors(Path(folder))
    geometry, params = Geometry.of(family), {}
    for mapping in family.mappings:
        for layer in layers_of(family, mapping):
            stage = 0 if layer is None else layer % layout.pp
            if stage != groups.pp.rank():
                continue
            group, lead = (groups.etp, (family.num_experts // layout.ep,)) if is_expert(mapping) else (groups.tp, ())
            sources = [tensors.source(name) for name in hf_names(mapping, layer, 0)]
            shape = shard_shape(mapping, sources, geometry, group.size())
            params[mapping.megatron.format(layer=layer)] = torch.zeros((*lead, *shape), dtype=dtype)
    made = ParameterMap(family, groups)
    made.load(params, tensors.source)
    return made, params


@dataclass
class Received:
    """Bytes that came from other ranks."""

    nbytes: int = 0


@contextmanager
def counting() -> Iterator[Received]:
    """Counts what collectives and messages bring to this rank; what ranks say of each other (``rlbatch.collectives``) is left out."""
    received = Received()
    broadcast, all_gather, batch = dist.broadcast, dist.all_gather_into_tensor, dist.batch_isend_irecv

    def counted_broadcast(tensor: Tensor, src: int, group: Any = None) -> Any:
        received.nbytes += tensor.nbytes if src != dist.get_rank() else 0
        return broadcast(tensor, src, group=group)

    def counted_gather(gathered: Tensor, tensor: Tensor, group: Any = None) -> Any:
        if sys._getframe(1).f_globals["__name__"] != "rlbatch.collectives":
            received.nbytes += gathered.nbytes - tensor.nbytes
        return all_gather(gathered, tensor, group=group)

    def counted_batch(operations: list[Any]) -> Any:
        received.nbytes += sum(operation.tensor.nbytes for operation in operations if operation.op is dist.irecv)
        return batch(operations)

    dist.broadcast, dist.all_gather_into_tensor, dist.batch_isend_irecv = counted_broadcast, counted_gather, counted_batch
    try:
        yield received
    finally:
        dist.broadcast, dist.all_gather_into_tensor, dist.batch_isend_irecv = broadcast, all_gather, batch


@dataclass(frozen=True)
class Exported:
    """What one rank saw.

    Attributes:
        tensors: Digest by name.
        order: Name (empty where there was none), shape and type of each place.
        nbytes: From other ranks.
    """

    tensors: dict[str, str]
    order: list[tuple[str, tuple[int, ...], torch.dtype]]
    nbytes: int


def digest(tensor: Tensor) -> str:
    """Of its type, shape and bits."""
    content = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return f"{tensor.dtype} {list(tensor.shape)} {hashlib.sha256(content).hexdigest()}"


def exports(folder: str, cases: Sequence[tuple[Layout, torch.dtype, bool, Sequence[Sequence[int] | None]]]) -> list[Exported]:
    """One after the other."""
    return [export(folder, *case) for case in cases]


def export(folder: str, layout: Layout, dtype: torch.dtype, quantize: bool, wanted: Sequence[Sequence[int] | None]) -> Exported:
    """Spreads the folder over the ranks and exports it; ``wanted`` of each rank."""
    mapping, params = sharded(folder, layout, dtype)
    tensors, order = {}, []
    with counting() as received:
        for name, tensor in mapping.export(params, quantize=quantize, wanted=wanted[dist.get_rank()]):
            order.append((name, tuple(tensor.shape), tensor.dtype))
            if name:
                assert name not in tensors, name
                tensors[name] = digest(tensor)
    return Exported(tensors, order, received.nbytes)
