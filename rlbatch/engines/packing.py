"""Weights laid out in memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

ALIGNMENT = 256
"""Bytes at whose multiples packed tensors start."""

Place = dict[str, Any]
"""A tensor in memory, as JSON: name, dtype, shape, memory (its key), start (bytes)."""


def place(name: str, tensor: Tensor, memory: str, start: int) -> Place:
    """Where a contiguous tensor is, or goes."""
    return {
        "name": name,
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "memory": memory,
        "start": start,
    }


def aligned(num_bytes: int) -> int:
    """What a packed tensor takes."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def pack(memory: Tensor, places: Sequence[Place], tensors: Sequence[Tensor]) -> None:
    """Copies the tensors to their places in [bytes] uint8 memory."""
    import torch

    if places:
        torch._foreach_copy_([view(memory, each) for each in places], list(tensors))


def view(memory: Tensor, where: Place) -> Tensor:
    """The tensor that lies in [bytes] uint8 memory; it shares it."""
    import torch

    dtype, shape = getattr(torch, where["dtype"]), where["shape"]
    size = dtype.itemsize * torch.Size(shape).numel()
    return memory[where["start"] : where["start"] + size].view(dtype).view(shape)


def views(memories: Mapping[str, Tensor], places: Sequence[Place]) -> Iterator[tuple[str, Tensor]]:
    """The tensors that lie in memories, by name."""
    for each in places:
        yield each["name"], view(memories[each["memory"]], each)
