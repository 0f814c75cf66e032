"""Gathers bytes, JSON and tensors of different lengths from the processes of a group. No pickles: torch's own way for objects runs code."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def all_gather_ragged(values: Tensor, group: dist.ProcessGroup | None = None) -> list[Tensor]:
    """Gathers one-dimensional host tensors of different lengths from all ranks, in rank order.

    Args:
        values: [n] on the host; the same dtype on every rank.
        group: Process group; None: all ranks.
    """
    device = torch.device("cpu" if "cpu" in str(dist.get_backend_config(group)) else f"cuda:{torch.cuda.current_device()}")
    size = dist.get_world_size(group)
    lengths = torch.zeros(size, dtype=torch.int64, device=device)
    dist.all_gather_into_tensor(lengths, torch.tensor([len(values)], device=device), group=group)
    sizes = lengths.tolist()
    padded = values.new_zeros(max(sizes), device=device)
    padded[: len(values)] = values
    together = padded.new_empty(size * len(padded))
    dist.all_gather_into_tensor(together, padded, group=group)
    return [part[:length] for part, length in zip(together.cpu().view(size, len(padded)), sizes, strict=True)]


def all_gather_bytes(content: bytes, group: dist.ProcessGroup | None = None) -> list[bytes]:
    """Gathers bytes from all ranks, in rank order; also a barrier.

    Args:
        content: Maybe of another length on every rank.
        group: Process group; None: all ranks.
    """
    return [part.numpy().tobytes() for part in all_gather_ragged(_as_tensor(content), group)]


def gathered(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """What every process of a group says, in the order of their ranks; a collective.

    Args:
        value: JSON: tuples come as lists.
        group: Process group; None: all ranks.
    """
    return [json.loads(content) for content in all_gather_bytes(json.dumps(value).encode(), group)]


def gather_bytes(content: bytes) -> list[bytes]:
    """Gathers bytes from all ranks on rank 0, in rank order; the others get nothing."""
    size, is_first = dist.get_world_size(), dist.get_rank() == 0
    lengths = torch.zeros(size, dtype=torch.int64)
    dist.all_gather_into_tensor(lengths, torch.tensor([len(content)]))
    padded = torch.zeros(int(lengths.max()), dtype=torch.uint8)
    padded[: len(content)] = _as_tensor(content)
    parts = [torch.empty_like(padded) for _ in range(size)] if is_first else None
    dist.gather(padded, parts)
    return [part[: int(length)].numpy().tobytes() for part, length in zip(parts or (), lengths, strict=False)]


def _as_tensor(content: bytes) -> Tensor:
    """[n] uint8; ``frombuffer`` knows no empty one."""
    return torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)
