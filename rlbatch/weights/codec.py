"""Does what each kind of parameter mapping means: Hugging Face tensors -> this rank's shard, and all shards -> Hugging Face tensors.

Pure functions of tensors; who holds which shard, and how shards meet, is ``rlbatch.weights.params``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from rlbatch.api import Buffer, DataError, Direct, ExpertDown, ExpertGated, Gated, ModelFamily, ParamMapping, Qkv, Vocab

CHUNK_BYTES = 4 * 2**20
"""Most bytes of a source that a thread has in memory; the C library reuses blocks of up to 32 MiB without new pages from the kernel."""
_CHUNK_ROWS = 128
"""Rows at a multiple of which chunks end, as a quantised source's blocks do."""


class Source(Protocol):
    """A Hugging Face tensor: a ``Tensor``, or one that is read when it is sliced.

    It may have ``read_into(target, index)``: ``target.copy_(self[index])`` without memory in between.
    """

    @property
    def shape(self) -> Sequence[int]:
        """The tensor's shape in the checkpoint."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its slices."""

    def __getitem__(self, index: tuple[slice, ...], /) -> Tensor:
        """A part of the tensor, on the host (or where the tensor is); ``index`` has a slice of step 1 for each leading dimension."""


@dataclass(frozen=True)
class Geometry:
    """The numbers that the mappings need.

    Attributes:
        num_experts: Experts of a layer; 0 if dense.
        heads: Query heads.
        kv_heads: Key-value heads.
        vocab_size: Rows of the embedding in the checkpoint.
    """

    num_experts: int
    heads: int
    kv_heads: int
    vocab_size: int

    @classmethod
    def of(cls, family: ModelFamily) -> Geometry:
        """The geometry of a model family."""
        transformer = family.transformer
        heads = int(transformer["num_attention_heads"])
        kv_heads = int(transformer.get("num_query_groups") or heads)
        return cls(family.num_experts, heads, kv_heads, family.vocab_size)


def is_expert(mapping: ParamMapping) -> bool:
    """Whether the Megatron tensor stacks experts."""
    return isinstance(mapping, (ExpertGated, ExpertDown))


def hf_patterns(mapping: ParamMapping) -> tuple[str, ...]:
    """The checkpoint names of a mapping, with placeholders, in the order of the codec's tensors."""
    match mapping:
        case Qkv():
            return mapping.hf_q, mapping.hf_k, mapping.hf_v
        case Gated() | ExpertGated():
            return mapping.hf_gate, mapping.hf_up
        case _:
            return (mapping.hf,)


def hf_names(mapping: ParamMapping, layer: int | None, expert: int | None = None) -> tuple[str, ...]:
    """The checkpoint names of one layer (and expert)."""
    return tuple(pattern.format(layer=layer, expert=expert) for pattern in hf_patterns(mapping))


def shard_shape(mapping: ParamMapping, sources: Sequence[Source], geometry: Geometry, size: int) -> tuple[int, ...]:
    """The shape of ``shard``'s result; nothing is read.

    Raises:
        DataError: shapes that do not go together, or cannot be divided by ``size``.
    """
    shapes = [tuple(source.shape) for source in sources]
    first = shapes[0]
    match mapping:
        case Buffer():
            return first
        case Direct():
            return first if mapping.tp_dim is None else _divided(mapping, first, mapping.tp_dim, size)
        case Vocab():
            _require(mapping, shapes, first[:1] == (geometry.vocab_size,), f"must have {geometry.vocab_size} rows")
            return (-(-first[0] // size), *first[1:])
        case Qkv():
            query, key, value = shapes
            is_grouped = key == value and query[1:] == key[1:] and query[:1] == (key[0] // geometry.kv_heads * geometry.heads,)
            _require(mapping, shapes, is_grouped, f"must be {geometry.heads} query heads and {geometry.kv_heads} key and value heads")
            if geometry.kv_heads % size:
                raise DataError(f"{mapping.hf_k}: {geometry.kv_heads} key-value heads cannot be divided over {size} ranks. Use fewer.")
            return ((query[0] + 2 * key[0]) // size, *query[1:])
        case Gated() | ExpertGated():
            _require(mapping, shapes, first == shapes[1], "must have one shape")
            rows, *rest = _divided(mapping, first, 0, size)
            return (2 * rows, *rest)
        case ExpertDown():
            return _divided(mapping, first, 1, size)


def fill(target: Tensor, mapping: ParamMapping, sources: Sequence[Source], geometry: Geometry, size: int, rank: int) -> None:
    """Copies rank ``rank``'s part, of ``size``, of what ``sources`` become in Megatron; at most ``CHUNK_BYTES`` at a time.

    Args:
        target: A tensor of ``shard_shape``, on any device, in any dtype; for an expert mapping, one expert's slice of the stack.
        mapping: Kind and names.
        sources: Full Hugging Face tensors in the order of ``hf_names`` (of one expert, for an expert mapping); sliced before anything is
            read.
        geometry: Model numbers.
        size: Tensor-parallel size (of experts, for an expert mapping).
        rank: Tensor-parallel rank.
    """
    for part, source, index in _pieces(target, mapping, sources, geometry, size, rank):
        if part.ndim == 0:
            part.copy_(source[()])
            continue
        first = index[0].start if index else 0
        rows = max(1, CHUNK_BYTES // max(1, part[:1].numel() * source.dtype.itemsize))
        rows -= rows % _CHUNK_ROWS if rows > _CHUNK_ROWS else 0
        start = 0
        while start < len(part):
            stop = min(len(part), (first + start + rows) // rows * rows - first)
            rows_index = (slice(first + start, first + stop), *index[1:])
            if hasattr(source, "read_into"):  # an instance check of a protocol takes 0.2 ms, of every tensor
                source.read_into(part[start:stop], rows_index)
            else:
                part[start:stop].copy_(source[rows_index])
            start = stop


def shard(mapping: ParamMapping, sources: Sequence[Source], geometry: Geometry, size: int, rank: int) -> Tensor:
    """Makes a rank's shard as ``fill`` does, in a new tensor of the first source's dtype."""
    device = sources[0].device if isinstance(sources[0], Tensor) else "cpu"
    target = torch.empty(shard_shape(mapping, sources, geometry, size), dtype=sources[0].dtype, device=device)
    fill(target, mapping, sources, geometry, size, rank)
    return target


Piece = tuple[Tensor, Source, "tuple[slice, ...]"]


def _pieces(target: Tensor, mapping: ParamMapping, sources: Sequence[Source], geometry: Geometry, size: int, rank: int) -> Iterator[Piece]:
    """Views of the target, and which part of which source belongs there."""
    match mapping:
        case Buffer():
            yield target, sources[0], ()
        case Direct():
            yield target, sources[0], () if mapping.tp_dim is None else _part(sources[0], mapping.tp_dim, size, rank)
        case Vocab():
            start, real = rank * len(target), geometry.vocab_size - rank * len(target)
            target[max(0, real) :].zero_()
            if real > 0:
                yield target[:real], sources[0], (slice(start, start + min(real, len(target))),)
        case Qkv():
            heads = geometry.kv_heads // size
            rows = [source.shape[0] // geometry.kv_heads for source in sources]
            start = 0
            for head in range(rank * heads, (rank + 1) * heads):
                for source, count in zip(sources, rows, strict=True):
                    yield target[start : start + count], source, (slice(head * count, (head + 1) * count),)
                    start += count
        case Gated() | ExpertGated():
            for half, source in zip(target.chunk(2), sources, strict=True):
                yield half, source, _part(source, 0, size, rank)
        case ExpertDown():
            yield target, sources[0], _part(sources[0], 1, size, rank)


def _part(source: Source, dim: int, size: int, rank: int) -> tuple[slice, ...]:
    length = source.shape[dim] // size
    return (*(slice(0, n) for n in source.shape[:dim]), slice(rank * length, (rank + 1) * length))


def _divided(mapping: ParamMapping, shape: tuple[int, ...], dim: int, size: int) -> tuple[int, ...]:
    _require(mapping, [shape], len(shape) > dim and shape[dim] % size == 0, f"dimension {dim} must be divisible by {size}")
    return (*shape[:dim], shape[dim] // size, *shape[dim + 1 :])


def _require(mapping: ParamMapping, shapes: Sequence[tuple[int, ...]], is_right: bool, rule: str) -> None:
    if not is_right:
        shown = ", ".join(map(str, shapes))
        raise DataError(f"{' + '.join(hf_patterns(mapping))}: shapes {shown}: {rule}. Is config.json this model's?")


def unshard(mapping: ParamMapping, shards: Sequence[Tensor], geometry: Geometry) -> list[Tensor]:
    """The inverse of ``shard``: all ranks' shards -> Hugging Face tensors in the order of ``hf_names``."""
    return joined(mapping, [parts(mapping, shard, geometry, len(shards)) for shard in shards], geometry)


def sharded_dim(mapping: ParamMapping) -> int | None:
    """The dimension of its Hugging Face tensors that tensor parallelism splits; None if every rank holds all of them."""
    match mapping:
        case Direct():
            return mapping.tp_dim
        case Buffer():
            return None
        case ExpertDown():
            return 1
        case _:
            return 0


def parts(mapping: ParamMapping, shard: Tensor, geometry: Geometry, size: int) -> list[Tensor]:
    """What one rank, of ``size``, holds of each Hugging Face tensor, in the order of ``hf_names``; views where that is possible."""
    match mapping:
        case Qkv():
            grouped = shard.unflatten(0, (geometry.kv_heads // size, -1))
            head_dim = grouped.shape[1] // (geometry.heads // geometry.kv_heads + 2)
            rows = [grouped.shape[1] - 2 * head_dim, head_dim, head_dim]
            return [part.flatten(0, 1) for part in grouped.split(rows, dim=1)]
        case Gated() | ExpertGated():
            return list(shard.chunk(2, 0))
        case _:
            return [shard]


def expert_parts(mapping: ParamMapping, stack: Tensor) -> Sequence[Tensor]:
    """``parts`` of every expert of a contiguous stack that is not sharded, expert after expert: views, all made in one operation."""
    matrices: Tensor = stack.unflatten(1, (len(hf_patterns(mapping)), -1)).flatten(0, 1)
    return matrices.unbind(0)


def joined(mapping: ParamMapping, by_rank: Sequence[Sequence[Tensor]], geometry: Geometry) -> list[Tensor]:
    """All ranks' ``parts`` -> the Hugging Face tensors."""
    dim = sharded_dim(mapping)
    is_whole = dim is None or len(by_rank) == 1
    tensors = list(by_rank[0]) if is_whole else [torch.cat(same, dim or 0) for same in zip(*by_rank, strict=True)]
    return [tensor[: geometry.vocab_size] for tensor in tensors] if isinstance(mapping, Vocab) else tensors
