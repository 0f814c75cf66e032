"""A family's parameters as boxes of a torch_dist checkpoint, and the Hugging Face tensors that they become."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from rlbatch.api import ModelFamily, ParamMapping
from rlbatch.config.schema import LayoutConfig
from rlbatch.megatron.checkpoint_chunks import ParameterChunk, rank_chunks
from rlbatch.weights.codec import Geometry, hf_names, is_expert, unshard
from rlbatch.weights.coverage import layers_of


@dataclass(frozen=True)
class Parameter:
    """A whole parameter, or one expert of it.

    Attributes:
        mapping: What it is.
        hf: Names of the Hugging Face tensors that it becomes.
        hf_shapes: Their shapes.
        shape: Its own.
        key: Key of the checkpoint's tensor that has the parameter.
        key_shape: Shape of that tensor, without the padded rows of a vocabulary.
        start: First index of the parameter's box there.
        size: Size of the parameter's box there: ones, then ``shape``.
    """

    mapping: ParamMapping
    hf: tuple[str, ...]
    hf_shapes: tuple[tuple[int, ...], ...]
    shape: tuple[int, ...]
    key: str
    key_shape: tuple[int, ...]
    start: tuple[int, ...]
    size: tuple[int, ...]


def by_name(family: ModelFamily) -> dict[str, tuple[ParamMapping, int | None]]:
    """Canonical parameter name -> its mapping and layer; first what lies outside the layers, then layer by layer."""
    named = [(layer, mapping.megatron.format(layer=layer), mapping) for mapping in family.mappings for layer in layers_of(family, mapping)]
    named.sort(key=lambda item: -1 if item[0] is None else item[0])
    return {name: (mapping, layer) for layer, name, mapping in named}


def parameters(family: ModelFamily) -> Iterator[Parameter]:
    """All of a model, in ``by_name``'s order."""
    chunks: dict[str, list[ParameterChunk]] = {}
    for chunk in next(iter(rank_chunks(family, LayoutConfig(world_size=1)))).chunks:
        chunks.setdefault(chunk.name, []).append(chunk)
    geometry = Geometry.of(family)
    for name, (mapping, layer) in by_name(family).items():
        first = chunks[name][0]
        lead = len(first.global_shape) - len(first.shape)
        start = tuple(map(min, zip(*(chunk.global_start for chunk in chunks[name]), strict=True)))
        if not is_expert(mapping):
            yield _parameter(mapping, hf_names(mapping, layer), first.shape, first, start, geometry)
            continue
        for expert in range(first.shape[0]):
            place = (*start[:lead], expert, *start[lead + 1 :])
            yield _parameter(mapping, hf_names(mapping, layer, expert), first.shape[1:], first, place, geometry)


def _parameter(
    mapping: ParamMapping, names: tuple[str, ...], shape: tuple[int, ...], chunk: ParameterChunk, start: tuple[int, ...], geometry: Geometry
) -> Parameter:
    made = unshard(mapping, [torch.empty(shape, device="meta")], geometry)
    size = (*(1 for _ in range(len(start) - len(shape))), *shape)
    return Parameter(mapping, names, tuple(tuple(tensor.shape) for tensor in made), shape, chunk.key, chunk.global_shape, start, size)
