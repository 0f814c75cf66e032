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

from rlbatch.api import Buffer, ModelError, ModelFamily, ParamMapping
from rlbatch.weights.codec import Geometry, hf_names, is_expert, shard, unshard

ReadTensor = Callable[[str], Tensor]
NamedTensor = tuple[str, Tensor]


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
        outside = [_Entry(m, None) for m in family.mappings if "{layer}" not in m.megatron]
        layered = [m for m in family.mappings if "{layer}" in m.megatron]
        self._entries = outside + [
            _Entry(m, layer) for layer in range(family.num_layers) for m in layered if m.layers is None or layer in m.layers
        ]

    def load(self, params: Mapping[str, Tensor], read: ReadTensor) -> None:
        """Fills this rank's parameters; each must be covered by a mapping.

        Args:
            params: Global Megatron name -> this rank's parameter.
            read: Gives a full Hugging Face tensor by name.

        Raises:
            ModelError: a parameter that no mapping covers, or a shape that does not fit.
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
                    self._fill(param[local], entry.mapping, hf_names(entry.mapping, entry.layer, first + local), read, self._groups.etp)
            else:
                self._fill(param, entry.mapping, hf_names(entry.mapping, entry.layer), read, self._groups.tp)

    def names(self) -> list[str]:
        """The Hugging Face name of every tensor that the mappings make, each as often as they name it."""
        experts = range(self._geometry.num_experts)
        return [
            name
            for entry in self._entries
            for expert in (experts if is_expert(entry.mapping) else (None,))
            for name in hf_names(entry.mapping, entry.layer, expert)
        ]

    def check_names(self, names: Iterable[str]) -> None:
        """Refuses a checkpoint with tensors that the family does not use: computing without them would be another model.

        Args:
            names: Of all tensors in the Hugging Face folder.

        Raises:
            ModelError: tensors that no mapping names.
        """
        unused = sorted(name for name in set(names) - set(self.names()) - self._untrained_names() if not self._is_redundant(name))
        if unused:
            raise ModelError(
                f"model family {self._family.name}: does not use {len(unused)} tensors of the checkpoint, first {', '.join(unused[:3])}. "
                "Use a family that implements them."
            )

    def _untrained_names(self) -> set[str]:
        experts = range(self._geometry.num_experts)
        return {
            carried.hf.format(layer=layer, expert=expert)
            for carried in self._family.passthrough
            for layer in carried.layers or (None,)
            for expert in (experts if "{expert}" in carried.hf else (None,))
        }

    def _is_redundant(self, name: str) -> bool:
        """RoPE frequencies, which follow from the config, and a tied output layer's copy of the embedding."""
        return name.endswith(".rotary_emb.inv_freq") or (self._family.tie_embeddings and name == "lm_head.weight")

    def _fill(self, target: Tensor, mapping: ParamMapping, names: tuple[str, ...], read: ReadTensor, group: dist.ProcessGroup) -> None:
        source = shard(mapping, [read(name) for name in names], self._geometry, group.size(), group.rank())
        if target.shape != source.shape:
            raise ModelError(
                f"{' + '.join(names)}: shape {tuple(source.shape)} does not fit Megatron's {tuple(target.shape)}. "
                "Is config.json this model's?"
            )
        with torch.no_grad():
            target.copy_(source)

    def export(self, params: Mapping[str, Tensor], *, gradients: bool = False) -> Iterator[NamedTensor]:
        """Streams full Hugging Face tensors; a collective: every rank iterates to the end and sees every tensor.

        Args:
            params: Global Megatron name -> this rank's shard (parameters, or their gradients).
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
