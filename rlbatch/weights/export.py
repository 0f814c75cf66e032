"""Streaming full Hugging Face tensors out of a sharded model, one after the other: from all pipeline, tensor and expert parallel ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlbatch.api import ModelError, ModelFamily, ParamMapping
from rlbatch.weights.codec import Geometry, hf_names, hf_patterns, is_expert
from rlbatch.weights.routing import Routes, exchange, gathered_routes
from rlbatch.weights.wire import NamedTensor, Wire

AT_ONCE_BYTES = 64 * 2**20
"""Experts of several ranks are gathered at once up to this size together, else one after the other."""


@dataclass(frozen=True)
class ParallelGroups:
    """The process groups that shards are spread over: tensor, expert-tensor, expert and pipeline parallel."""

    tp: dist.ProcessGroup
    etp: dist.ProcessGroup
    ep: dist.ProcessGroup
    pp: dist.ProcessGroup


@dataclass(frozen=True)
class Entry:
    """One Megatron tensor: a mapping at a layer (None outside the layers)."""

    mapping: ParamMapping
    layer: int | None

    @property
    def name(self) -> str:
        """In Megatron's model."""
        return self.mapping.megatron.format(layer=self.layer)


class Exporter:
    """One export; every rank makes one, and iterates ``tensors`` to the end.

    Args:
        family: Of the model.
        groups: Who holds what.
        params: Global Megatron name -> this rank's shard.
        quantize: Whether the family's fp8 weights leave as e4m3 and scales.
    """

    def __init__(self, family: ModelFamily, groups: ParallelGroups, params: Mapping[str, Tensor], *, quantize: bool) -> None:
        self._family, self._groups, self._params = family, groups, params
        self._fp8 = family.fp8 if quantize else frozenset()
        self._geometry = Geometry.of(family)
        self._device = next(iter(params.values())).device

    def tensors(self, entries: Sequence[Entry], wanted: Sequence[int] | None) -> Iterator[NamedTensor]:
        """See ``ParameterMap.export``."""
        owners = self._stage_owners(entries)
        has_experts = any(is_expert(entry.mapping) for entry in entries)
        place = (self._groups.pp.rank(), self._groups.ep.rank(), self._groups.etp.rank())
        routes = gathered_routes(place, wanted, self._family.num_experts, self._device) if has_experts else None
        for entry in entries:
            stage, shape, dtype = owners[entry.name]
            local = self._params[entry.name].detach() if self._groups.pp.rank() == stage else None
            if not is_expert(entry.mapping):
                wire = self._wire(entry.mapping, self._groups.tp.size(), shape, dtype)
                travelled = _gathered(self._from_stage(stage, wire, local), self._groups.tp)
                yield from wire.decode(hf_names(entry.mapping, entry.layer), travelled)
                continue
            wire = self._wire(entry.mapping, self._groups.etp.size(), shape[1:], dtype)
            if routes is None:
                for index in range(shape[0]):
                    yield from self._of_all_ranks(entry, wire, stage, index, shape[0], local)
            else:
                yield from self._routed(entry, wire, stage, local, routes)

    def _wire(self, mapping: ParamMapping, size: int, shape: torch.Size, dtype: torch.dtype) -> Wire:
        return Wire(mapping, self._geometry, size, shape, dtype, [pattern in self._fp8 for pattern in hf_patterns(mapping)])

    def _of_all_ranks(self, entry: Entry, wire: Wire, stage: int, index: int, per_rank: int, local: Tensor | None) -> Iterator[NamedTensor]:
        """Expert number ``index`` of every expert-parallel rank, to every rank."""
        part = self._from_stage(stage, wire, None if local is None else local[index])
        shards, ep = _gathered(part, self._groups.etp), self._groups.ep
        if wire.nbytes * len(shards) * ep.size() <= AT_ONCE_BYTES:
            by_shard = [_gathered(shard, ep) for shard in shards]
            by_rank = ([ranks[rank] for ranks in by_shard] for rank in range(ep.size()))
        else:
            by_rank = (
                [_broadcast(shard if rank == ep.rank() else torch.empty_like(shard), rank, ep) for shard in shards]
                for rank in range(ep.size())
            )
        for rank, travelled in enumerate(by_rank):
            yield from wire.decode(hf_names(entry.mapping, entry.layer, rank * per_rank + index), travelled)

    def _routed(self, entry: Entry, wire: Wire, stage: int, local: Tensor | None, routes: Routes) -> Iterator[NamedTensor]:
        """The experts that this rank wants; where others want more, empty tensors (``meta``) without a name in their place."""
        for slot in range(routes.slots):
            shards: dict[int, Tensor] = {}
            for step in routes.rounds(stage, slot):
                mine = wire.encode(local[step.index]) if local is not None and step.index is not None else None
                memory = {shard: wire.empty(self._device) for shard, sender in step.shards.items() if sender != dist.get_rank()}
                shards |= exchange(step, mine, memory)
            expert = routes.wanted(slot)
            if expert is None:
                nothing = wire.decode(hf_patterns(entry.mapping), [wire.empty("meta")] * routes.shards)
                yield from (("", tensor) for _, tensor in nothing)
            else:
                names = hf_names(entry.mapping, entry.layer, expert)
                yield from wire.decode(names, [shards[shard] for shard in range(routes.shards)])

    def _stage_owners(self, entries: Sequence[Entry]) -> dict[str, tuple[int, torch.Size, torch.dtype]]:
        """Name -> (first pipeline rank that holds it, shape and dtype of a shard)."""
        stages: list[Any] = [None] * self._groups.pp.size()
        dist.all_gather_object(stages, {name: (t.shape, t.dtype) for name, t in self._params.items()}, group=self._groups.pp)
        owners: dict[str, tuple[int, torch.Size, torch.dtype]] = {}
        for stage, described in enumerate(stages):
            for name, (shape, dtype) in described.items():
                owners.setdefault(name, (stage, shape, dtype))
        absent = [entry.name for entry in entries if entry.name not in owners]
        if absent:
            raise ModelError(
                f"model family {self._family.name}: Megatron's model has no {', '.join(absent[:5])} ({len(absent)} mappings). Correct them."
            )
        return owners

    def _from_stage(self, stage: int, wire: Wire, local: Tensor | None) -> Tensor:
        """What the owner stage's shard travels as, on every stage."""
        tensor = wire.empty(self._device) if local is None else wire.encode(local)
        return _broadcast(tensor, stage, self._groups.pp)


def _broadcast(tensor: Tensor, source: int, group: dist.ProcessGroup) -> Tensor:
    """The tensor of a rank of the group; the others' is overwritten."""
    if group.size() > 1:
        dist.broadcast(tensor, dist.get_global_rank(group, source), group=group)
    return tensor


def _gathered(tensor: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    if group.size() == 1:
        return [tensor]
    parts = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    return parts
