"""Finds a rank's parts of a checkpoint's tensors, in boxes of bounded size that are views of its memory. Nothing is gathered.

Data-parallel ranks share a parameter's optimizer state by cutting buffers of gradients into runs, wherever they end. A run of an array's
elements is a few boxes of it: as such a rank writes what it has, and any layout finds in whole tensors what it needs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.core.dist_checkpointing.mapping import is_main_replica
from torch import Tensor

from rlbatch.megatron.checkpoint_chunks import ParameterChunk, placed_chunks

PART_BYTES = 2**27
"""Largest size of a part, bytes; a rank has one of them in a buffer."""

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""First index and size of a box, in each dimension."""


@dataclass(frozen=True)
class Part:
    """A box of one of a checkpoint's tensors.

    Attributes:
        key: Name of the tensor.
        shape: Shape of the tensor.
        start: First index of the box in the tensor.
        values: Values of the box, a view of this rank's memory, perhaps strided.
        is_padded: Whether the number of rows may differ, as in ``ParameterChunk``.
    """

    key: str
    shape: tuple[int, ...]
    start: tuple[int, ...]
    values: Tensor
    is_padded: bool = False


@dataclass(frozen=True)
class Run:
    """The part of one parameter that a rank's optimizer holds.

    Attributes:
        param: Parameter that the run is a part of.
        first: Index of the run's first element in the flattened parameter.
        end: Index behind its last element.
        state: The optimizer's name -> main weights, moments (each as long as the run) and step count.
    """

    param: Tensor
    first: int
    end: int
    state: Mapping[str, Any]

    def parts(self, chunk: ParameterChunk) -> Iterator[Part]:
        """Yields the parts of main weights and moments that are in a chunk."""
        for name, values in self.state.items():
            if values.dim():  # a step count is no part
                yield from parts(values, self.first, chunk, f"optimizer.state.{name}.{chunk.key}")


def weights(stages: Iterable[Any]) -> Iterator[Part]:
    """Yields all weights and buffers of a rank's model chunks, with those that other ranks hold too."""
    for stage in stages:
        for tensor, chunk, _ in placed_chunks(stage):
            yield from parts(tensor, 0, chunk, chunk.key)


def written(stages: Iterable[Any], optimizers: Iterable[Any]) -> Iterator[Part]:
    """Yields the parts that a rank writes. All ranks together write everything once.

    Args:
        stages: Model chunks of the rank.
        optimizers: Distributed optimizers of the rank, which divide main weights and moments; weights are divided alike.
    """
    held = {id(run.param): run for optimizer in optimizers for run in runs(optimizer)}
    for stage in stages:
        for tensor, chunk, replica in placed_chunks(stage):
            if not tensor.requires_grad:
                yield from parts(tensor, 0, chunk, chunk.key) if is_main_replica(replica) else ()
            elif id(tensor) in held and is_main_replica(replica[:-1]):  # the last number is of those that share the state
                run = held[id(tensor)]
                yield from parts(tensor.detach().view(-1)[run.first : run.end], run.first, chunk, chunk.key)
                yield from run.parts(chunk)


def runs(optimizer: Any) -> Iterator[Run]:
    """Yields this rank's run of each parameter of a distributed optimizer, whose state must exist."""
    for param in getattr(optimizer, "model_param_group_index_map", ()):
        place = optimizer._get_model_param_range_map(param)["param"]
        yield Run(param, place.start, place.end, optimizer._get_main_param_and_optimizer_states(param))


def parts(values: Tensor, first: int, chunk: ParameterChunk, key: str) -> Iterator[Part]:
    """Yields the parts of a run of a parameter's elements that are in a chunk.

    Args:
        values: Values of the run, contiguous, of any shape.
        first: Index of the run's first element in the flattened parameter.
        chunk: Box of the parameter, and its place in a checkpoint's tensor.
        key: Name of that tensor.
    """
    run = values.detach().view(-1)
    strides = [math.prod(chunk.shape[axis + 1 :]) for axis in range(len(chunk.shape))]
    lead = len(chunk.global_shape) - len(chunk.shape)
    for box in boxes(first, first + run.numel(), chunk.shape):
        for start, size in divided(_common(box, (chunk.start, chunk.size)), run.itemsize):
            offset = run.storage_offset() + sum(at * stride for at, stride in zip(start, strides, strict=True)) - first
            place = (at + low - begin for at, low, begin in zip(start, chunk.global_start[lead:], chunk.start, strict=True))
            view = run.as_strided((*(1,) * lead, *size), (*(1,) * lead, *strides), offset)
            yield Part(key, chunk.global_shape, (*chunk.global_start[:lead], *place), view, chunk.is_padded)


def boxes(first: int, end: int, shape: Sequence[int]) -> Iterator[Box]:
    """Yields boxes whose elements in order are a run of an array's elements; fewer than two for each dimension."""
    if first >= end:
        return
    if not shape:
        yield (), ()
        return
    row = math.prod(shape[1:])
    (low, head), (high, tail) = divmod(first, row), divmod(end, row)
    if low == high:
        yield from _in_row(low, head, tail, shape)
        return
    if head:
        yield from _in_row(low, head, row, shape)
        low += 1
    if low < high:
        yield (low, *(0,) * (len(shape) - 1)), (high - low, *shape[1:])
    yield from _in_row(high, 0, tail, shape)


def _in_row(index: int, first: int, end: int, shape: Sequence[int]) -> Iterator[Box]:
    yield from (((index, *start), (1, *size)) for start, size in boxes(first, end, shape[1:]))


def divided(box: Box, itemsize: int, most: int | None = None) -> Iterator[Box]:
    """Yields the boxes of at most ``most`` bytes (None: ``PART_BYTES``) that make up a box, cut along its first dimensions."""
    start, size = box
    nbytes, most = math.prod(size) * itemsize, most or PART_BYTES
    axis = next((axis for axis, length in enumerate(size) if length > 1), None)
    if axis is None or nbytes <= most:
        yield from [box] if nbytes else []
        return
    step = max(1, size[axis] * most // nbytes)
    for at in range(0, size[axis], step):
        length = min(step, size[axis] - at)
        smaller = (*start[:axis], start[axis] + at, *start[axis + 1 :]), (*size[:axis], length, *size[axis + 1 :])
        yield from divided(smaller, itemsize, most)


def _common(one: Box, other: Box) -> Box:
    """The box that two boxes share; of size 0 if they share nothing."""
    start = tuple(map(max, one[0], other[0]))
    ends = (min(a + m, b + n) for a, m, b, n in zip(*one, *other, strict=True))
    return start, tuple(max(0, end - low) for end, low in zip(ends, start, strict=True))
