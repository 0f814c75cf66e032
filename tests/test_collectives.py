"""What ranks say of each other arrives whole and in rank order, and nothing of it is a pickle."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rlbatch.collectives import all_gather_bytes, all_gather_ragged, gather_bytes, gathered

LARGE = 2**24 + 1
"""The first integer that float32 does not have."""


def tensors(lengths: list[int]) -> list[list[int]]:
    """All ranks' tensors: rank r has ``lengths[r]`` elements of value LARGE + r."""
    rank = dist.get_rank()
    return [values.tolist() for values in all_gather_ragged(torch.full((lengths[rank],), LARGE + rank))]


def contents(given: list[bytes]) -> tuple[list[bytes], list[bytes]]:
    """On this rank: what came by ``all_gather_bytes`` and by ``gather_bytes``."""
    mine = given[dist.get_rank()]
    return all_gather_bytes(mine), gather_bytes(mine)


def values() -> list[Any]:
    """JSON of another length on every rank."""
    return gathered({"rank": dist.get_rank(), "long": "x" * (100 * dist.get_rank())})


@pytest.mark.parametrize("lengths", [[2, 3], [0, 3], [3, 0], [0, 0]])
def test_tensors_of_different_lengths(lengths: list[int], rank_pool) -> None:
    """Also those without an element arrive, with exact integers."""
    expected = [[LARGE + rank] * length for rank, length in enumerate(lengths)]
    assert rank_pool(2).run(tensors, lengths) == [expected, expected]


@pytest.mark.parametrize("given", [[b"\x00\xff", b"abc"], [b"", b"abc"], [b"abc", b""], [b"", b""]])
def test_bytes(given: list[bytes], rank_pool) -> None:
    """Bytes of any length arrive everywhere, or on rank 0 alone."""
    assert rank_pool(2).run(contents, given) == [(given, given), (given, [])]


def test_values(rank_pool) -> None:
    """Every rank knows what all say."""
    expected = [{"rank": 0, "long": ""}, {"rank": 1, "long": "x" * 100}]
    assert rank_pool(2).run(values) == [expected, expected]


@pytest.mark.parametrize("folder", ["rlbatch", "plugins"])
def test_no_collective_of_pickles(folder: str, repository: Path) -> None:
    """torch's collectives of objects unpickle what comes."""
    for path in (repository / folder).rglob("*.py"):
        assert not re.search(r"(gather|broadcast|scatter|send|recv)_object", path.read_text(encoding="utf-8")), path
