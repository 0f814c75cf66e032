"""One rank's answer for all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist

from rlbatch.api import CheckpointError, ConfigError, RlbatchError
from rlbatch.first_rank import on_first_rank

VALUES = [None, 7, "é\n", Path("/a/b"), (Path("/a"), {"step": 3, "names": ["x"], "none": None}), {}]


class OwnError(ConfigError):
    """Of a plugin: other ranks may not know it."""


def answers() -> list[Any]:
    """On every rank: what rank 0's functions return and raise."""
    found = [on_first_rank(lambda value=value: value if dist.get_rank() == 0 else "not rank 0's") for value in VALUES]
    for kind in (CheckpointError, OwnError, RlbatchError):

        def fail(kind: type[RlbatchError] = kind) -> None:
            raise kind("words")

        try:
            on_first_rank(fail)
        except RlbatchError as error:
            found.append((type(error).__name__, str(error)))
    return found


def test_every_rank_gets_the_same(rank_pool) -> None:
    """Values and paths as they are; errors by their class of the API, with their words."""
    for found in rank_pool(2).run(answers):
        assert found == [*VALUES, ("CheckpointError", "words"), ("ConfigError", "words"), ("RlbatchError", "words")]
