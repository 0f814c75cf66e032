"""Checks whether an all-reduce between the ranks gives the right numbers, and how fast."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

BLOCK = 1024
"""Numbers that each rank contributes to the check."""
TIMED_BYTES = {"cuda": 64 * 2**20, "cpu": 2**20}
REPEATS = 3


@dataclass(frozen=True)
class LinkSpeeds:
    """What one rank measured of the links.

    Attributes:
        wrong: Ranks whose contribution arrived wrong here.
        gbs: Bus bandwidth of an all-reduce over all ranks, GB/s (2 (n - 1) / n x bytes / time, as NCCL's tests say it); 0 for one rank.
        node_gbs: The same over the ranks of this node.
    """

    wrong: tuple[int, ...] = ()
    gbs: float = 0.0
    node_gbs: float = 0.0


def check_links(device: str, rank: int, hosts: Sequence[str]) -> LinkSpeeds:
    """Checks and measures; a collective of all ranks. Its groups, and what NCCL allocates for them, are gone afterwards.

    Raises:
        RuntimeError: the ranks cannot reach each other; torch's message.
    """
    if len(hosts) == 1:
        return LinkSpeeds()
    nodes = [[rank for rank, other in enumerate(hosts) if other == host] for host in dict.fromkeys(hosts)]
    node_gbs = 0.0
    for ranks in nodes if 1 < len(nodes) < len(hosts) else []:
        node_gbs = _over(ranks, device, rank).gbs or node_gbs
    links = _over(list(range(len(hosts))), device, rank)
    return LinkSpeeds(links.wrong, links.gbs, links.gbs if len(nodes) == 1 else node_gbs)


def wrong_contributions(reduced: Tensor) -> list[int]:
    """Which ranks' blocks are not what those ranks put in.

    Args:
        reduced: float32 [ranks + 1, BLOCK]: one block of each rank, then the sum of all.

    Returns:
        Positions in the group. If only the sum is wrong, whose fault it is does not show: all.
    """
    blocks = torch.stack([_pattern(position, reduced.device) for position in range(len(reduced) - 1)])
    wrong = [position for position, block in enumerate(blocks) if not torch.equal(reduced[position], block)]
    return wrong or (list(range(len(blocks))) if not torch.equal(reduced[-1], blocks.sum(0)) else [])


def contribution(position: int, size: int, device: str) -> Tensor:
    """What a rank puts in: zeros but for its own block and its part of the sum. float32 [size + 1, BLOCK], all sums exact."""
    data = torch.zeros(size + 1, BLOCK, device=device)
    data[position] = data[-1] = _pattern(position, data.device)
    return data


def _over(ranks: list[int], device: str, rank: int) -> LinkSpeeds:
    """Checks some of the ranks; all ranks call it, and those that are not among them measure nothing."""
    kind = device.partition(":")[0]
    group = dist.new_group(ranks, backend="nccl" if kind == "cuda" else "gloo")
    if rank not in ranks or len(ranks) == 1:
        return LinkSpeeds()
    data = contribution(ranks.index(rank), len(ranks), device)
    dist.all_reduce(data, group=group)
    wrong = tuple(ranks[position] for position in wrong_contributions(data))
    payload = torch.ones(TIMED_BYTES[kind] // 4, device=device)
    seconds = min(_timed(payload, group) for _ in range(REPEATS))
    dist.destroy_process_group(group)
    return LinkSpeeds(wrong, 2 * (len(ranks) - 1) / len(ranks) * TIMED_BYTES[kind] / seconds / 1e9)


def _timed(payload: Tensor, group: dist.ProcessGroup | None) -> float:
    """Seconds that an all-reduce takes."""
    if payload.is_cuda:
        torch.cuda.synchronize()
    started = time.perf_counter()
    dist.all_reduce(payload, op=dist.ReduceOp.MAX, group=group)
    if payload.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - started


def _pattern(position: int, device: torch.device) -> Tensor:
    """Whole numbers below 2**14, different for each rank: the sum of 1024 ranks' is exact in float32."""
    return ((torch.arange(BLOCK, device=device) * 131 + position * 977) % 16381).float()
