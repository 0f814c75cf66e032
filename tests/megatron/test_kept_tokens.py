"""Kept tokens of some positions."""

from __future__ import annotations

import random

import pytest
import torch

from rlbatch.api import KeptTokens
from rlbatch.megatron.kept_tokens import at_positions


@pytest.mark.parametrize("seed", range(20))
def test_each_position_takes_its_own(seed: int) -> None:
    """In any order, and any of them several times or not at all; positions without any, too."""
    draw = random.Random(seed)
    rows = [[draw.randrange(10) for _ in range(draw.randrange(4))] for _ in range(draw.randint(1, 8))]
    positions = [draw.randrange(len(rows)) for _ in range(draw.randrange(10))]
    kept = KeptTokens(torch.tensor([token for row in rows for token in row], dtype=torch.int32), torch.tensor([len(row) for row in rows]))
    got = at_positions(kept, torch.tensor(positions, dtype=torch.int64))
    assert [part.tolist() for part in got.ids.split(got.counts.tolist())] == [rows[position] for position in positions]
