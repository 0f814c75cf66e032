"""What ranks say of each other arrives whole and in rank order, and nothing of it is a pickle."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from rlbatch.collectives import all_gather_bytes, all_gather_ragged, all_to_all_bytes, all_to_all_ragged, gather_lines, gathered

LARGE = 2**24 + 1
"""The first integer that float32 does not have."""


def tensors(lengths: list[int], padded_bytes: int) -> list[list[int]]:
    """All ranks' tensors: rank r has ``lengths[r]`` elements of value LARGE + r."""
    rank = dist.get_rank()
    with mock.patch("rlbatch.collectives.PADDED_BYTES", padded_bytes):
        return [values.tolist() for values in all_gather_ragged(torch.full((lengths[rank],), LARGE + rank))]


def contents(given: list[bytes]) -> list[bytes]:
    """On this rank: what came."""
    return all_gather_bytes(given[dist.get_rank()])


def handed_out(lengths: list[list[int]]) -> tuple[list[list[int]], list[bytes]]:
    """What came to this rank of tensors, and of bytes: rank r gives rank s ``lengths[r][s]`` elements of value LARGE + 10 r + s."""
    rank = dist.get_rank()
    mine = [torch.full((length,), LARGE + 10 * rank + to) for to, length in enumerate(lengths[rank])]
    return [part.tolist() for part in all_to_all_ragged(mine)], all_to_all_bytes([bytes([rank]) * length for length in lengths[rank]])


def lines(given: list[list[bytes]], block_bytes: int) -> list[list[bytes]]:
    """What rank 0 reads; it begins with the last rank's."""
    parts = gather_lines(given[dist.get_rank()], block_bytes)
    return [list(part) for part in reversed(parts)][::-1]


def values() -> list[Any]:
    """JSON of another length on every rank."""
    return gathered({"rank": dist.get_rank(), "long": "x" * (100 * dist.get_rank())})


@pytest.mark.parametrize("padded_bytes", [2**20, 0], ids=["at once", "rank by rank"])
@pytest.mark.parametrize("lengths", [[2, 3], [0, 3], [3, 0], [0, 0]])
def test_tensors_of_different_lengths(lengths: list[int], padded_bytes: int, rank_pool) -> None:
    """Also those without an element arrive, with exact integers."""
    expected = [[LARGE + rank] * length for rank, length in enumerate(lengths)]
    assert rank_pool(2).run(tensors, lengths, padded_bytes) == [expected, expected]


@pytest.mark.parametrize("given", [[b"\x00\xff", b"abc"], [b"", b"abc"], [b"abc", b""], [b"", b""]])
def test_bytes(given: list[bytes], rank_pool) -> None:
    """Bytes of any length arrive everywhere."""
    assert rank_pool(2).run(contents, given) == [given, given]


@pytest.mark.parametrize("lengths", [[[1, 2], [3, 4]], [[0, 5], [0, 0]], [[2, 0], [0, 0]], [[0, 0], [0, 0]]], ids=str)
def test_each_rank_gets_what_is_for_it(lengths: list[list[int]], rank_pool) -> None:
    """From every rank, also nothing, in rank order."""
    assert rank_pool(2).run(handed_out, lengths) == [
        ([[LARGE + 10 * of + to] * lengths[of][to] for of in range(2)], [bytes([of]) * lengths[of][to] for of in range(2)])
        for to in range(2)
    ]


@pytest.mark.parametrize("block_bytes", [1, 7, 0])
@pytest.mark.parametrize("given", [[[b"a", b"bc"], [b"", b"def", b"g"]], [[b"a"], []], [[], [b"long" * 100, b"x"]], [[], []]])
def test_lines_come_to_rank_0(given: list[list[bytes]], block_bytes: int, rank_pool) -> None:
    """All of every rank, in its order, in blocks of any size, whichever is read first."""
    assert rank_pool(2).run(lines, given, block_bytes) == [given, []]


def test_values(rank_pool) -> None:
    """Every rank knows what all say."""
    expected = [{"rank": 0, "long": ""}, {"rank": 1, "long": "x" * 100}]
    assert rank_pool(2).run(values) == [expected, expected]


@pytest.mark.parametrize("folder", ["rlbatch", "plugins"])
def test_no_collective_of_pickles(folder: str, repository: Path) -> None:
    """torch's collectives of objects unpickle what comes."""
    for path in (repository / folder).rglob("*.py"):
        assert not re.search(r"(gather|broadcast|scatter|send|recv)_object", path.read_text(encoding="utf-8")), path
