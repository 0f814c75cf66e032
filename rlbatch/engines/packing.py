"""A bucket of weights laid out in one piece of memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

ALIGNMENT = 256
"""Bytes at whose multiples tensors start."""

Place = dict[str, Any]
"""A tensor in the memory, as JSON: name, dtype, shape, start (bytes)."""


def layout(names: Sequence[str], tensors: Sequence[Tensor]) -> tuple[list[Place], int]:
    """Where each tensor goes, and how many bytes they take together."""
    places: list[Place] = []
    size = 0
    for name, tensor in zip(names, tensors, strict=True):
        dtype = str(tensor.dtype).removeprefix("torch.")
        places.append({"name": name, "dtype": dtype, "shape": list(tensor.shape), "start": size})
        size += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    return places, size


def pack(memory: Tensor, places: Sequence[Place], tensors: Sequence[Tensor]) -> None:
    """Copies the tensors to their places in [bytes] uint8 memory."""
    for view, tensor in zip(views(memory, places), tensors, strict=True):
        view[1].copy_(tensor)


def views(memory: Tensor, places: Sequence[Place]) -> Iterator[tuple[str, Tensor]]:
    """The tensors that lie in the memory, by name; they share it."""
    import torch

    for place in places:
        dtype, shape = getattr(torch, place["dtype"]), place["shape"]
        size = dtype.itemsize * torch.Size(shape).numel()
        yield place["name"], memory[place["start"] : place["start"] + size].view(dtype).view(shape)
