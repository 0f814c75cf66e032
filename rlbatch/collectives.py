"""Moves bytes, JSON and tensors of different lengths between processes of a group. No pickles: torch's own way for objects runs code."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

PADDED_BYTES = 2**20
"""Bytes of all ranks together that are gathered at once, padded to the longest; more come rank by rank, as one rank may have all."""
BLOCKS_BYTES = 2**23
"""Bytes of all blocks of lines together that rank 0 holds while it reads."""


def all_gather_ragged(values: Tensor, group: dist.ProcessGroup | None = None) -> list[Tensor]:
    """Gathers one-dimensional host tensors of different lengths from all ranks, in rank order.

    Args:
        values: [n] on the host; the same dtype on every rank.
        group: Process group; None: all ranks.
    """
    device = _device(group)
    size = dist.get_world_size(group)
    lengths = torch.zeros(size, dtype=torch.int64, device=device)
    dist.all_gather_into_tensor(lengths, torch.tensor([len(values)], device=device), group=group)
    sizes = lengths.tolist()
    if sum(sizes) * values.element_size() > PADDED_BYTES:
        parts = [values.new_empty(length, device=device) for length in sizes]
        parts[dist.get_rank(group)].copy_(values)
        for source, part in enumerate(parts):
            if len(part):
                dist.broadcast(part, group=group, group_src=source)
        return [part.cpu() for part in parts]
    padded = values.new_zeros(max(sizes), device=device)
    padded[: len(values)] = values
    together = padded.new_empty(size * len(padded))
    dist.all_gather_into_tensor(together, padded, group=group)
    return [part[:length] for part, length in zip(together.cpu().view(size, len(padded)), sizes, strict=True)]


def all_to_all_ragged(parts: Sequence[Tensor], group: dist.ProcessGroup | None = None) -> list[Tensor]:
    """Gives each rank of a group its part, and returns what each gave this one, in rank order.

    Args:
        parts: [n_r] on the host for each rank r; the same dtype on every rank.
        group: Process group; None: all ranks.
    """
    device = _device(group)
    given = [len(part) for part in parts]
    lengths = torch.zeros(len(given), dtype=torch.int64, device=device)
    dist.all_to_all_single(lengths, torch.tensor(given, device=device), group=group)
    coming = lengths.tolist()
    received = parts[0].new_empty(sum(coming), device=device)
    dist.all_to_all_single(received, torch.cat(list(parts)).to(device), coming, given, group=group)
    return list(received.cpu().split(coming))


def all_to_all_bytes(parts: Sequence[bytes]) -> list[bytes]:
    """Gives each rank its bytes, and returns what each rank gave this one, in rank order; see ``all_to_all_ragged``."""
    return [part.numpy().tobytes() for part in all_to_all_ragged([_as_tensor(part) for part in parts])]


def all_gather_bytes(content: bytes, group: dist.ProcessGroup | None = None) -> list[bytes]:
    """Gathers bytes from all ranks, in rank order; also a barrier.

    Args:
        content: Maybe of another length on every rank.
        group: Process group; None: all ranks.
    """
    return [part.numpy().tobytes() for part in all_gather_ragged(_as_tensor(content), group)]


def gathered(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """The values that the processes of a group give, in rank order; a collective.

    Args:
        value: JSON: tuples come as lists.
        group: Process group; None: all ranks.
    """
    return [json.loads(content) for content in all_gather_bytes(json.dumps(value).encode(), group)]


def gather_lines(lines: Iterable[bytes], block_bytes: int = 0) -> list[Iterator[bytes]]:
    """Brings lines of all ranks to rank 0, block by block as it reads them: it holds one block of each rank.

    Args:
        lines: Without line breaks; read once.
        block_bytes: Bytes of a block, which has at least one line; 0: all blocks together have ``BLOCKS_BYTES``.

    Returns:
        On rank 0, each rank's lines; it must read all of them. On other ranks nothing, once rank 0 has read theirs.
    """
    size, block_bytes = dist.get_world_size(), block_bytes or BLOCKS_BYTES // dist.get_world_size()
    if dist.get_rank() == 0:
        return [iter(lines), *(_lines_of(rank) for rank in range(1, size))]
    for block in _blocks(lines, block_bytes):
        dist.send(torch.tensor([len(block)]), 0)
        dist.send(_as_tensor(block), 0)
    dist.send(torch.tensor([0]), 0)
    return []


def _blocks(lines: Iterable[bytes], block_bytes: int) -> Iterator[bytes]:
    block = bytearray()
    for line in lines:
        block += line + b"\n"
        if len(block) >= block_bytes:
            yield bytes(block)
            block.clear()
    if block:
        yield bytes(block)


def _lines_of(rank: int) -> Iterator[bytes]:
    length = torch.zeros(1, dtype=torch.int64)
    while True:
        dist.recv(length, rank)
        if not length:
            return
        block = torch.empty(int(length), dtype=torch.uint8)
        dist.recv(block, rank)
        content = io.BytesIO(block.numpy().tobytes())
        del block
        for line in content:
            yield line[:-1]


def _device(group: dist.ProcessGroup | None) -> torch.device:
    """The device on which a group's tensors must lie: the host, if the group can use it."""
    return torch.device("cpu" if "cpu" in str(dist.get_backend_config(group)) else f"cuda:{torch.cuda.current_device()}")


def _as_tensor(content: bytes) -> Tensor:
    """Bytes as a tensor, [n] uint8; ``frombuffer`` would refuse empty ones."""
    return torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)
