"""Groups that wait are in a checkpoint as files of the ranks that had them, which any number of ranks reads."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from rlbatch.api import DataError
from rlbatch.pipeline.waiting_groups import FILE, Candidate, Waiting, pack_candidates, restored
from tests.pipeline.samples import GROUPS, VERSION, group

COUNTS = {"drawn": 9, "accepted": 3, "generated": 70, "trained": 50}
PROMPTS = [group(position).prompt for position in range(GROUPS)]


def waits(position: int) -> Candidate:
    """Number 10 + position; the groups at 1 and 4 are not finished."""
    own = group(position)
    if position in (1, 4):
        own.rewards = []
    return Candidate(10 + position, position, own)


def written(folder: Path, ranks: dict[int, list[int]]) -> Path:
    """A checkpoint's folder; rank -> the positions that it had."""
    folder.mkdir()
    for rank, positions in ranks.items():
        (folder / FILE.format(rank=rank)).write_bytes(pack_candidates(list(map(waits, positions))))
    return folder


def read(folder: Path) -> tuple[Waiting, dict[str, Any]] | str:
    """On this rank."""
    try:
        waiting = restored(folder, COUNTS, PROMPTS)
    except DataError as error:
        return str(error)
    assert {number: pack_candidates([each]) for number, each in waiting.held.items()} == {
        number: pack_candidates([waits(number - 10)]) for number in waiting.held
    }
    dist.barrier()
    return waiting, waiting.counts()


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("ranks", [{0: [0, 4], 3: [2, 1], 17: [3]}, {2: [4, 3, 2, 1, 0]}], ids=str)
def test_any_number_of_ranks_reads_them(ranks: dict[int, list[int]], world_size: int, tmp_path: Path, rank_pool) -> None:
    """Each group is on one rank, bitwise as it was; all ranks know of all, in order, and how old each is."""
    answers = rank_pool(world_size).run(read, written(tmp_path / "step", ranks))
    assert sorted(number for waiting, _ in answers for number in waiting.held) == [10, 11, 12, 13, 14]
    for rank, (waiting, counts) in enumerate(answers):
        assert waiting.accepted == ((10, 0, VERSION), (12, 2, VERSION), (13, 3, VERSION - 2))
        assert waiting.unfinished == ((11, 1, VERSION - 1), (14, 4, VERSION))
        assert counts == COUNTS
        assert set(waiting.held) == {10 + position for other, own in ranks.items() for position in own if other % world_size == rank}


def test_one_file_of_all(tmp_path: Path, rank_pool) -> None:
    """As checkpoints had it before."""
    folder = written(tmp_path / "step", {0: [0, 1, 2, 3, 4]})
    (folder / FILE.format(rank=0)).rename(folder / "waiting.safetensors")
    for rank, (waiting, _) in enumerate(rank_pool(2).run(read, folder)):
        assert len(waiting.accepted) == 3
        assert len(waiting.held) == (0 if rank else 5)


def test_a_file_that_is_gone_is_missed(tmp_path: Path, rank_pool) -> None:
    """With both numbers."""
    folder = written(tmp_path / "step", {0: [0, 2, 1]})
    told = f"{folder}: 2 of 3 groups that waited are there. Restore it, or name another checkpoint."
    assert rank_pool(2).run(read, folder) == [told, told]


def test_a_file_that_one_rank_cannot_read_is_every_ranks_error(tmp_path: Path, rank_pool) -> None:
    """None waits for the one that has met it."""
    folder = written(tmp_path / "step", {0: [0, 2], 1: [1, 3]})
    os.truncate(folder / FILE.format(rank=1), 100)
    [told, _] = said = rank_pool(2).run(read, folder)
    assert said == [told, told]
    assert str(told).startswith(f"{folder / FILE.format(rank=1)}: cannot be read (")
