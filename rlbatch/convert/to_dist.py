"""Hugging Face folder -> torch_dist: every rank's chunks, each made from the slices of the tensors that it needs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import groupby

import torch
from torch import Tensor

from rlbatch.api import DataError, ModelError, ModelFamily, ParamMapping
from rlbatch.checkpoint import archive
from rlbatch.checkpoint.block_file import Part
from rlbatch.checkpoint.hf import HfTensors
from rlbatch.checkpoint.torch_dist import CHUNK_SUFFIX, Chunk
from rlbatch.config.schema import LayoutConfig
from rlbatch.convert.output import Output
from rlbatch.convert.parameters import by_name
from rlbatch.megatron.checkpoint_chunks import RankChunks, rank_chunks
from rlbatch.megatron.names import extra_states, local_name
from rlbatch.weights.codec import Geometry, Source, fill, hf_names, is_expert, shard_shape

CHUNK_BYTES = 2**30
"""Most of a chunk; larger ones are cut along their first dimension that is longer than 1."""


@dataclass(frozen=True)
class _Shard:
    """A rank's part of a parameter, or of one expert of it: what a few chunks are cut from."""

    mapping: ParamMapping
    sources: tuple[Source, ...]
    geometry: Geometry
    size: int
    rank: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def tensor(self, memory: Tensor) -> Tensor:
        target = memory[: self.nbytes].view(self.dtype).view(self.shape)
        fill(target, self.mapping, self.sources, self.geometry, self.size, self.rank)
        return target


@dataclass(frozen=True)
class _Cut:
    """A chunk: a box of a shard, and its place in the checkpoint."""

    shard: _Shard
    start: tuple[int, ...]
    size: tuple[int, ...]
    key: str
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]

    @property
    def stored(self) -> tuple[int, ...]:
        """The shape it is stored in: that of the checkpoint's tensor has more dimensions."""
        return (*(1 for _ in range(len(self.offset) - len(self.size))), *self.size)

    def moved(self, axis: int, first: int, length: int) -> _Cut:
        """The part of the chunk that has ``length`` elements from ``first`` on along one dimension."""
        at = axis + len(self.offset) - len(self.size)
        return replace(
            self,
            start=(*self.start[:axis], self.start[axis] + first, *self.start[axis + 1 :]),
            size=(*self.size[:axis], length, *self.size[axis + 1 :]),
            offset=(*self.offset[:at], self.offset[at] + first, *self.offset[at + 1 :]),
        )


def outputs(family: ModelFamily, hf: HfTensors, layout: LayoutConfig, file_bytes: float) -> tuple[list[Output], list[Chunk]]:
    """The files of a checkpoint, and what is in them.

    Args:
        family: The model's family.
        hf: The source; ``check_names`` has accepted its names.
        layout: Whose ranks the chunks are for.
        file_bytes: Most bytes of a file; a larger chunk has one of its own.

    Raises:
        DataError: a tensor that is missing, or of another shape or type.
    """
    files: list[Output] = []
    chunks: list[Chunk] = []
    for of_rank in rank_chunks(family, layout):
        cuts: list[tuple[_Cut, int]] = []
        held = number = 0
        for cut in _cuts(family, hf, of_rank):
            nbytes = archive.length(cut.stored, cut.shard.dtype)
            if cuts and held + nbytes > file_bytes:
                files.append(_file(f"__{of_rank.rank}_{number}{CHUNK_SUFFIX}", cuts, chunks))
                cuts, held, number = [], 0, number + 1
            cuts.append((cut, nbytes))
            held += nbytes
        if cuts:
            files.append(_file(f"__{of_rank.rank}_{number}{CHUNK_SUFFIX}", cuts, chunks))
    return files, [*chunks, *_under_other_names(chunks)]


def empty_objects(chunks: Sequence[Chunk]) -> list[str]:
    """Keys of the objects that Megatron's own models look for beside the tensors."""
    shapes = {chunk.key: chunk.shape for chunk in chunks}
    return [name for key, shape in shapes.items() for name in extra_states(key, shape)]


def _under_other_names(chunks: Sequence[Chunk]) -> list[Chunk]:
    """The same bytes under the names of Megatron's local spec, so that models of either spec load them."""
    taken = {chunk.key for chunk in chunks}
    renamed = [replace(chunk, key=local_name(chunk.key)) for chunk in chunks]
    return [chunk for chunk in renamed if chunk.key and chunk.key not in taken]


def _file(name: str, cuts: Sequence[tuple[_Cut, int]], chunks: list[Chunk]) -> Output:
    end = 0
    for cut, nbytes in cuts:
        chunks.append(Chunk(cut.key, cut.shard.dtype, cut.global_shape, cut.offset, cut.stored, name, end, nbytes))
        end += nbytes

    def parts() -> Iterator[Part]:
        # For one shard after the other: the system clears new memory, which takes longer than to fill it.
        memory = torch.empty(max(cut.shard.nbytes for cut, _ in cuts), dtype=torch.uint8)
        for _, group in groupby((cut for cut, _ in cuts), key=lambda cut: id(cut.shard)):
            tensor = None
            for cut in group:
                tensor = cut.shard.tensor(memory) if tensor is None else tensor
                box = tensor[tuple(slice(start, start + size) for start, size in zip(cut.start, cut.size, strict=True))]
                yield from archive.parts(box.reshape(cut.stored).contiguous())

    return Output(name, end, parts)


def _cuts(family: ModelFamily, hf: HfTensors, of_rank: RankChunks) -> Iterator[_Cut]:
    mappings = by_name(family)
    geometry = Geometry.of(family)
    for name, group in groupby(of_rank.chunks, key=lambda chunk: chunk.name):
        chunks = list(group)
        if name not in mappings:
            raise ModelError(f"model family {family.name}: no mapping covers {name}. Add one.")
        mapping, layer = mappings[name]
        if not is_expert(mapping):
            shard = _shard(hf, mapping, hf_names(mapping, layer), geometry, of_rank.tp, chunks[0].shape)
            for chunk in chunks:
                yield from _divided(_Cut(shard, chunk.start, chunk.size, chunk.key, chunk.global_shape, chunk.global_start))
            continue
        lead = len(chunks[0].global_shape) - len(chunks[0].shape)
        for local in range(chunks[0].shape[0]):
            expert = of_rank.ep[1] * chunks[0].shape[0] + local
            shard = _shard(hf, mapping, hf_names(mapping, layer, expert), geometry, of_rank.etp, chunks[0].shape[1:])
            for chunk in chunks:
                offset = (*chunk.global_start[:lead], chunk.global_start[lead] + local, *chunk.global_start[lead + 1 :])
                yield from _divided(_Cut(shard, chunk.start[1:], chunk.size[1:], chunk.key, chunk.global_shape, offset))


def _shard(
    hf: HfTensors, mapping: ParamMapping, names: tuple[str, ...], geometry: Geometry, place: tuple[int, int], wanted: tuple[int, ...]
) -> _Shard:
    sources = tuple(hf.source(name) for name in names)
    shape = shard_shape(mapping, sources, geometry, place[0])
    if shape != wanted:
        raise DataError(f"{' + '.join(names)}: shape {shape} does not fit Megatron's {wanted}. Is config.json this model's?")
    dtype = reduce(torch.promote_types, (source.dtype for source in sources))
    return _Shard(mapping, sources, geometry, place[0], place[1], shape, dtype)


def _divided(cut: _Cut) -> Iterator[_Cut]:
    """A cut in parts of at most ``CHUNK_BYTES``."""
    nbytes = math.prod(cut.size) * cut.shard.dtype.itemsize
    axis = next((axis for axis, size in enumerate(cut.size) if size > 1), None)
    if axis is None or nbytes <= CHUNK_BYTES:
        yield cut
        return
    step = max(1, cut.size[axis] * CHUNK_BYTES // nbytes)
    for first in range(0, cut.size[axis], step):
        yield cut.moved(axis, first, min(step, cut.size[axis] - first))
