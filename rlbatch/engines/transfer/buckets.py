"""Weights laid out in memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

ALIGNMENT = 256
"""Bytes at whose multiples packed tensors start."""

TensorLocation = dict[str, Any]
"""A tensor in memory, as JSON: name, dtype, shape, memory (its key), start (bytes)."""


def tensor_location(name: str, tensor: Tensor, memory: str, start: int) -> TensorLocation:
    """Describes where a contiguous tensor is, or goes."""
    return {
        "name": name,
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "memory": memory,
        "start": start,
    }


def aligned(num_bytes: int) -> int:
    """Bytes that a packed tensor takes: its size, rounded up to ``ALIGNMENT``."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def pack(memory: Tensor, locations: Sequence[TensorLocation], tensors: Sequence[Tensor]) -> None:
    """Copies the tensors to their places in [bytes] uint8 memory."""
    import torch

    if locations:
        targets = views(dict.fromkeys({each["memory"] for each in locations}, memory), locations)
        torch._foreach_copy_([target for _, target in targets], list(tensors))


def view(memory: Tensor, where: TensorLocation) -> Tensor:
    """The tensor that lies in [bytes] uint8 memory; it shares it."""
    return next(views({where["memory"]: memory}, [where]))[1]


def views(memories: Mapping[str, Tensor], locations: Iterable[TensorLocation]) -> Iterator[tuple[str, Tensor]]:
    """The tensors that lie in memories, by name. One operator for each, as there may be thousands."""
    import torch

    typed: dict[tuple[str, str], Tensor] = {}
    for each in locations:
        kind = each["memory"], each["dtype"]
        if kind not in typed:
            dtype, memory = getattr(torch, each["dtype"]), memories[each["memory"]]
            typed[kind] = memory[: len(memory) // dtype.itemsize * dtype.itemsize].view(dtype)
        whole = typed[kind]
        start, rest = divmod(each["start"], whole.itemsize)
        if rest:
            raise ValueError(f"weight sync: {each['name']} starts at byte {each['start']}, between two values of {each['dtype']}")
        strides, count = _contiguous(each["shape"])
        if start + count > len(whole):
            raise ValueError(f"weight sync: {each['name']} goes beyond its memory of {len(whole)} values")
        yield each["name"], whole.as_strided(each["shape"], strides, int(whole.storage_offset()) + start)


def _contiguous(shape: Sequence[int]) -> tuple[list[int], int]:
    """Strides of a contiguous tensor, and the number of its elements."""
    strides, count = [], 1
    for size in reversed(shape):
        strides.append(count)
        count *= size
    return strides[::-1], count
