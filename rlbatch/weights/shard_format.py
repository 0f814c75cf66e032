"""The form in which a parameter's shards travel between ranks, and what Hugging Face tensors they become.

A shard travels as it is. Where weights are quantised and the blocks of a rank's part are the tensor's own, each rank quantises its part and
e4m3 values and scales travel, packed into bytes; elsewhere bf16 travels, and the whole tensor is quantised at its end. Either way the
result is ``quantize`` of the whole tensor in bf16, bit by bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlbatch.api import ParamMapping
from rlbatch.weights.codec import Geometry, expert_parts, joined, parts, sharded_dim
from rlbatch.weights.quantize import BLOCK, SCALE_SUFFIX, quantize, scales_shape

NamedTensor = tuple[str, Tensor]


@dataclass(frozen=True)
class _Piece:
    """One tensor of a packed shard."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class ShardFormat:
    """The form in which one mapping's shards travel. Every rank makes the same one.

    Args:
        mapping: Kind and names.
        geometry: Model numbers.
        size: Ranks that the parameter is split over.
        shape: Shape of a shard (of one expert's, for an expert mapping).
        dtype: Dtype of a shard.
        quantised: Whether each Hugging Face tensor, in the order of ``hf_names``, is quantised.
    """

    def __init__(
        self, mapping: ParamMapping, geometry: Geometry, size: int, shape: Sequence[int], dtype: torch.dtype, quantised: Sequence[bool]
    ) -> None:
        self._mapping, self._geometry, self._size, self._quantised = mapping, geometry, size, tuple(quantised)
        dim = sharded_dim(mapping)
        shapes = [tuple(part.shape) for part in parts(mapping, torch.empty(tuple(shape), device="meta"), geometry, size)]
        # A partial block at the end of a rank's part would be a block of its own.
        self._early = [
            is_fp8 and (dim is None or size == 1 or part[dim] % BLOCK == 0) for is_fp8, part in zip(quantised, shapes, strict=True)
        ]
        self._is_packed = any(self._early)
        self._whole = _Piece(torch.bfloat16 if all(quantised) else dtype, tuple(shape))
        pieces: dict[tuple[int, int], _Piece] = {}
        for part, (part_shape, is_fp8, is_early) in enumerate(zip(shapes, quantised, self._early, strict=True)):
            if is_early:
                pieces[part, 0] = _Piece(torch.uint8, part_shape)  # joined as bytes: not every device joins e4m3
                pieces[part, 1] = _Piece(torch.float32, scales_shape(*part_shape))
            else:
                pieces[part, 0] = _Piece(torch.bfloat16 if is_fp8 else dtype, part_shape)
        # The widest first: each then begins at a multiple of its own width.
        self._pieces = dict(sorted(pieces.items(), key=lambda item: -item[1].dtype.itemsize))

    @property
    def nbytes(self) -> int:
        """Size of one rank's shard on its way."""
        return sum(piece.nbytes for piece in self._pieces.values()) if self._is_packed else self._whole.nbytes

    def encode(self, shard: Tensor, *, is_stack: bool = False) -> Tensor:
        """The form in which a shard, or each of a stack, travels: contiguous, and the shard itself where nothing has to be changed."""
        if not self._is_packed:
            return shard.to(self._whole.dtype).contiguous()
        if is_stack:
            return torch.stack([self.encode(each) for each in shard])
        made: dict[tuple[int, int], Tensor] = {}
        for part, tensor in enumerate(parts(self._mapping, shard, self._geometry, self._size)):
            if self._early[part]:
                made[part, 0], made[part, 1] = quantize(tensor.to(torch.bfloat16))
            else:
                made[part, 0] = tensor.to(self._pieces[part, 0].dtype)
        return torch.cat([made[place].contiguous().flatten().view(torch.uint8) for place in self._pieces])

    def views(self, stack: Tensor) -> list[tuple[Tensor, ...]] | None:
        """Each expert's Hugging Face tensors, if they are views of a rank's stack; made at once, that is a tenth of the time."""
        if self._size > 1 or any(self._quantised) or not stack.is_contiguous():
            return None
        views, count = expert_parts(self._mapping, stack), len(self._quantised)
        return [tuple(views[first : first + count]) for first in range(0, len(views), count)]

    def empty(self, device: torch.device | str, count: int | None = None) -> Tensor:
        """Memory for what travels of a shard, or of a stack of ``count``."""
        stack = () if count is None else (count,)
        if self._is_packed:
            return torch.empty((*stack, self.nbytes), dtype=torch.uint8, device=device)
        return torch.empty((*stack, *self._whole.shape), dtype=self._whole.dtype, device=device)

    def decode(self, names: Sequence[str], travelled: Sequence[Tensor]) -> Iterator[NamedTensor]:
        """What arrived of all ranks, in their order -> Hugging Face tensors; a quantised one is followed by its scales."""
        if not self._is_packed and not any(self._quantised):
            whole = [parts(self._mapping, shard, self._geometry, self._size) for shard in travelled]
            yield from zip(names, joined(self._mapping, whole, self._geometry), strict=True)
            return
        by_rank = [self._unpacked(shard) for shard in travelled]
        values = joined(self._mapping, [shard[0] for shard in by_rank], self._geometry)
        scales = joined(self._mapping, [shard[1] for shard in by_rank], self._geometry)
        for part, (name, value) in enumerate(zip(names, values, strict=True)):
            if not self._quantised[part]:
                yield name, value
                continue
            e4m3, scale = (value.view(torch.float8_e4m3fn), scales[part]) if self._early[part] else quantize(value)
            yield name, e4m3
            yield name + SCALE_SUFFIX, scale

    def _unpacked(self, travelled: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Unpacks one rank's part of each Hugging Face tensor, and its scales; an empty tensor where there are none."""
        if not self._is_packed:
            whole = parts(self._mapping, travelled, self._geometry, self._size)
            return whole, [travelled.new_empty(0, 0)] * len(whole)
        found, start = {}, 0
        for place, piece in self._pieces.items():
            found[place] = travelled[start : start + piece.nbytes].view(piece.dtype).view(piece.shape)
            start += piece.nbytes
        count = len(self._quantised)
        return [found[part, 0] for part in range(count)], [found.get((part, 1), travelled.new_empty(0, 0)) for part in range(count)]
