"""Gathering in pieces gives what ranks have, in order, without what fills up their shares."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from rlbatch.megatron.gathered_state import gather


def gathered(at_once: int, total: int, padded: int, cuts: list[int]) -> list[float]:
    """Numbers 1 to ``total``, cut at ``cuts``; of each cut a rank has what falls into its share."""
    share = padded // dist.get_world_size()
    first = dist.get_rank() * share
    parts = []
    for start, end in zip([0, *cuts], [*cuts, total], strict=True):
        low, high = max(start, first), min(end, first + share)
        if low < high:
            parts.append((low - first, torch.arange(low + 1.0, high + 1.0)))
    into = torch.zeros(total)
    gather(parts, into, padded, dist.group.WORLD, at_once)
    return into.tolist()


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("at_once", [2, 6, 100])
def test_all_ranks_get_all_numbers(ranks: int, at_once: int, rank_pool) -> None:
    """Whatever is gathered at once, and wherever tensors begin and end; the last share is not full."""
    expected = [float(number) for number in range(1, 12)]
    assert rank_pool(ranks).run(gathered, at_once, 11, 14, [3, 9]) == [expected] * ranks
