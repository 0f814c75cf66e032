"""Applying a family's mappings to a sharded model: loading each rank's shards, and streaming full Hugging Face tensors out of them.

Megatron names here are global: layer indices count from the first pipeline stage. Nothing holds more than one Hugging Face tensor
(for experts: one expert of each expert-parallel rank) beside the shards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlbatch.api import Buffer, DataError, ModelError, ModelFamily, ParamMapping
from rlbatch.weights.audit import check_names, layers_of, trained_names
from rlbatch.weights.codec import Geometry, Source, fill, hf_names, is_expert, shard_shape, unshard

ReadTensor = Callable[[str], Source]
NamedTensor = tuple[str, Tensor]


def _ignore(nbytes: int) -> None:
    """For whoever shows no progress."""


@dataclass(frozen=True)
class ParallelGroups:
    """The process groups that shards are spread over: tensor, expert-tensor, expert and pipeline parallel."""

    tp: dist.ProcessGroup
    etp: dist.ProcessGroup
    ep: dist.ProcessGroup
    pp: dist.ProcessGroup


@dataclass(frozen=True)
class _Entry:
    """One Megatron tensor: a mapping at a layer (None outside the layers)."""

    mapping: ParamMapping
    layer: int | None

    @property
    def name(self) -> str:
        return self.mapping.megatron.format(layer=self.layer)


class ParameterMap:
    """A family's mappings over one layout.

    Args:
        family: Mappings.
        groups: Who holds what.
    """

    def __init__(self, family: ModelFamily, groups: ParallelGroups) -> None:
        self._family = family
        self._groups = groups
        self._geometry = Geometry.of(family)
        # One order on all ranks: first what lies outside the layers, then layer by layer.
        entries = [_Entry(mapping, layer) for mapping in family.mappings for layer in layers_of(family, mapping)]
        self._entries = sorted(entries, key=lambda entry: -1 if entry.layer is None else entry.layer)

    def load(self, params: Mapping[str, Tensor], read: ReadTensor, loaded: Callable[[int], None] = _ignore) -> None:
        """Fills this rank's parameters and buffers; each must be covered by a mapping.

        Each source is sliced before it is read, and goes straight into the parameter: beside the parameters there are at most twice
        ``codec.CHUNK_BYTES`` in memory, or what the source needs for a chunk.

        Args:
            params: Global Megatron name -> this rank's parameter or buffer.
            read: Gives a Hugging Face tensor by name, or one that is read when it is sliced.
            loaded: Told the bytes of each parameter (or expert of it) that was filled.

        Raises:
            ModelError: a parameter that no mapping covers.
            DataError: a shape that does not fit.
        """
        uncovered = sorted(set(params) - {entry.name for entry in self._entries})
        if uncovered:
            raise ModelError(
                f"model family {self._family.name}: no mapping covers {', '.join(uncovered[:5])} ({len(uncovered)} parameters). Add them."
            )
        for entry in self._entries:
            if entry.name not in params:
                continue
            param = params[entry.name]
            if is_expert(entry.mapping):
                first = self._groups.ep.rank() * param.shape[0]
                for local in range(param.shape[0]):
                    names = hf_names(entry.mapping, entry.layer, first + local)
                    self._fill(param[local], entry.mapping, names, read, self._groups.etp)
                    loaded(param[local].nbytes)
            else:
                self._fill(param, entry.mapping, hf_names(entry.mapping, entry.layer), read, self._groups.tp)
                loaded(param.nbytes)

    def names(self) -> list[str]:
        """The Hugging Face name of every tensor that the mappings make."""
        return list(trained_names(self._family))

    def check_names(self, names: Iterable[str]) -> None:
        """As ``audit.check_names``."""
        check_names(self._family, names)

    def _fill(self, target: Tensor, mapping: ParamMapping, names: tuple[str, ...], read: ReadTensor, group: dist.ProcessGroup) -> None:
        sources = [read(name) for name in names]
        shape = shard_shape(mapping, sources, self._geometry, group.size())
        if tuple(target.shape) != shape:
            where = " + ".join(getattr(source, "origin", name) for source, name in zip(sources, names, strict=True))
            raise DataError(f"{where}: shape {shape} does not fit Megatron's {tuple(target.shape)}. Is config.json this model's?")
        with torch.no_grad():
            fill(target, mapping, sources, self._geometry, group.size(), group.rank())

    def export(self, params: Mapping[str, Tensor], *, gradients: bool = False) -> Iterator[NamedTensor]:
        """Streams full Hugging Face tensors; a collective: every rank iterates to the end and sees every tensor.

        Args:
            params: Global Megatron name -> this rank's shard (parameters and buffers, or gradients).
            gradients: Whether they are gradients, which buffers have none of.

        Yields:
            Hugging Face name and tensor, in the same order on all ranks; a tensor may be a view of a parameter.

        Raises:
            ModelError: a mapping whose parameter no rank has.
        """
        entries = [entry for entry in self._entries if not (gradients and isinstance(entry.mapping, Buffer))]
        owners, device = self._stage_owners(params, entries), next(iter(params.values())).device
        for entry in entries:
            stage, shape, dtype = owners[entry.name]
            local = params[entry.name].detach() if self._groups.pp.rank() == stage else None
            if is_expert(entry.mapping):
                for index in range(shape[0]):
                    part = self._from_stage(stage, None if local is None else local[index], shape[1:], dtype, device)
                    yield from self._experts(entry, index, shape[0], part)
            else:
                part = self._from_stage(stage, local, shape, dtype, device)
                tensors = unshard(entry.mapping, _gathered(part, self._groups.tp), self._geometry)
                yield from zip(hf_names(entry.mapping, entry.layer), tensors, strict=True)

    def _experts(self, entry: _Entry, index: int, per_rank: int, part: Tensor) -> Iterator[NamedTensor]:
        """Expert number ``index`` of every expert-parallel rank."""
        by_etp = [_gathered(shards, self._groups.ep) for shards in _gathered(part, self._groups.etp)]
        for rank in range(self._groups.ep.size()):
            tensors = unshard(entry.mapping, [shards[rank] for shards in by_etp], self._geometry)
            yield from zip(hf_names(entry.mapping, entry.layer, rank * per_rank + index), tensors, strict=True)

    def _stage_owners(self, params: Mapping[str, Tensor], entries: Sequence[_Entry]) -> dict[str, tuple[int, torch.Size, torch.dtype]]:
        """Name -> (first pipeline rank that holds it, shape and dtype of a shard)."""
        stages: list[Any] = [None] * self._groups.pp.size()
        dist.all_gather_object(stages, {name: (t.shape, t.dtype) for name, t in params.items()}, group=self._groups.pp)
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

    def _from_stage(self, stage: int, local: Tensor | None, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The owner stage's tensor, on every stage."""
        tensor = torch.empty(shape, dtype=dtype, device=device) if local is None else local.contiguous()
        if self._groups.pp.size() > 1:
            dist.broadcast(tensor, dist.get_global_rank(self._groups.pp, stage), group=self._groups.pp)
        return tensor


def _gathered(tensor: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    if group.size() == 1:
        return [tensor]
    parts = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    return parts
