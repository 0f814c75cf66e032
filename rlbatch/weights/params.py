"""Applies a family's mappings to a sharded model: loads each rank's shards, and streams full Hugging Face tensors out of them.

Megatron names here are global: layer indices count from the first pipeline stage.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from rlbatch.api import Buffer, DataError, ModelError, ModelFamily, ParamMapping
from rlbatch.weights.codec import Geometry, Source, fill, hf_names, is_expert, shard_shape
from rlbatch.weights.coverage import check_names, layers_of, trained_names
from rlbatch.weights.export import Exporter, MappedTensor, ParallelGroups
from rlbatch.weights.filling import Threads
from rlbatch.weights.shard_format import NamedTensor

__all__ = ["NamedTensor", "ParallelGroups", "ParameterMap", "ReadTensor"]

ReadTensor = Callable[[str], Source]


def _ignore(nbytes: int) -> None:
    """A progress callback that shows nothing."""


@torch.no_grad()
def _filled(target: Tensor, mapping: ParamMapping, sources: Sequence[Source], geometry: Geometry, size: int, rank: int) -> int:
    fill(target, mapping, sources, geometry, size, rank)
    return target.nbytes


class ParameterMap:
    """A family's mappings over one layout."""

    def __init__(self, family: ModelFamily, groups: ParallelGroups) -> None:
        self._family = family
        self._groups = groups
        self._geometry = Geometry.of(family)
        # One order on all ranks: first what lies outside the layers, then layer by layer.
        entries = [MappedTensor(mapping, layer) for mapping in family.mappings for layer in layers_of(family, mapping)]
        self._entries = sorted(entries, key=lambda entry: -1 if entry.layer is None else entry.layer)
        self._exporters: dict[Hashable, Exporter] = {}

    def load(self, params: Mapping[str, Tensor], read: ReadTensor, loaded: Callable[[int], None] = _ignore) -> None:
        """Fills this rank's parameters and buffers; each must be covered by a mapping.

        Each source is sliced before it is read, and goes straight into the parameter: beside the parameters there are for each of
        ``filling.THREADS`` at most twice ``codec.CHUNK_BYTES`` in memory, or what the source needs for a chunk.

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
        with Threads() as threads:
            for nbytes in threads.run(self._filling(params, read)):
                loaded(nbytes)

    def _filling(self, params: Mapping[str, Tensor], read: ReadTensor) -> Iterator[Callable[[], int]]:
        """One call for each parameter (or expert of it), which fills it and returns its bytes."""
        for entry in self._entries:
            if entry.name not in params:
                continue
            param = params[entry.name]
            if is_expert(entry.mapping):
                first = self._groups.ep.rank() * param.shape[0]
                for local in range(param.shape[0]):
                    names = hf_names(entry.mapping, entry.layer, first + local)
                    yield self._fill(param[local], entry.mapping, names, read, self._groups.etp)
            else:
                yield self._fill(param, entry.mapping, hf_names(entry.mapping, entry.layer), read, self._groups.tp)

    def origin(self, name: str, local_expert: int = 0) -> tuple[int | None, str]:
        """Layer and Hugging Face names of a Megatron tensor; of a stack of experts, those of one of this rank's."""
        entry = next(entry for entry in self._entries if entry.name == name)
        experts = self._family.num_experts // self._groups.ep.size()
        expert = self._groups.ep.rank() * experts + local_expert if is_expert(entry.mapping) else None
        return entry.layer, " + ".join(hf_names(entry.mapping, entry.layer, expert))

    def names(self) -> list[str]:
        """The Hugging Face name of every tensor that the mappings make."""
        return list(trained_names(self._family))

    def check_names(self, names: Iterable[str]) -> None:
        """Refuses names that are not the family's; see ``coverage.check_names``."""
        check_names(self._family, names)

    def _fill(
        self, target: Tensor, mapping: ParamMapping, names: tuple[str, ...], read: ReadTensor, group: dist.ProcessGroup
    ) -> Callable[[], int]:
        sources = [read(name) for name in names]
        shape = shard_shape(mapping, sources, self._geometry, group.size())
        if tuple(target.shape) != shape:
            where = " + ".join(getattr(source, "origin", name) for source, name in zip(sources, names, strict=True))
            raise DataError(f"{where}: shape {shape} does not fit Megatron's {tuple(target.shape)}. Is config.json this model's?")
        return partial(_filled, target, mapping, sources, self._geometry, group.size(), group.rank())

    def export(
        self, params: Mapping[str, Tensor], *, gradients: bool = False, quantize: bool = False, wanted: Sequence[int] | None = None
    ) -> Iterator[NamedTensor]:
        """Streams full Hugging Face tensors; a collective: every rank iterates to the end.

        Every rank gets every tensor, in the same order; of experts, where any rank gives ``wanted``, only those that it wants. The tensors
        of the n-th place then have the same shape on all ranks, whichever expert's they are; a rank that wants fewer experts than others
        gets empty tensors without a name (``""``, device ``meta``) in the remaining places.

        Beside the parameters there are in memory: one Hugging Face tensor (of an expert mapping: one expert's), what it travels as, and
        ``export.AT_ONCE_BYTES``.

        Args:
            params: Global Megatron name -> this rank's shard (parameters and buffers, or gradients).
            gradients: Whether they are gradients, which buffers have none of.
            quantize: Whether the family's fp8 weights are quantised: each gives ``X.weight`` (e4m3) and ``X.weight_scale_inv`` (float32),
                bitwise ``quantize`` of the whole tensor in bf16.
            wanted: Experts that this rank gets in every layer that has any; None: all.

        Yields:
            Hugging Face name and tensor; a tensor may be a view of a parameter.

        Raises:
            ModelError: a mapping whose parameter no rank has.
        """
        entries = [entry for entry in self._entries if not (gradients and isinstance(entry.mapping, Buffer))]
        described = {name: (tensor.shape, tensor.dtype) for name, tensor in params.items()}
        key = (gradients, quantize, tuple(described.items()))
        if key not in self._exporters:
            self._exporters[key] = Exporter(self._family, self._groups, entries, described, quantize=quantize)
        yield from self._exporters[key].tensors(params, wanted)
