"""One rank's answer for all, and nothing that ranks say of each other is a pickle."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from rlbatch.api import CheckpointError, ConfigError, RlbatchError
from rlbatch.collectives import gathered
from rlbatch.pipeline.first_rank import on_first_rank

VALUES = [None, 7, "é\n", Path("/a/b"), (Path("/a"), {"step": 3, "names": ["x"], "none": None}), {}]


class OwnError(ConfigError):
    """Of a plugin: other ranks may not know it."""


def answers() -> list[Any]:
    """On every rank: what rank 0's functions return and raise, and what all ranks say."""
    found = [on_first_rank(lambda value=value: value if dist.get_rank() == 0 else "not rank 0's") for value in VALUES]
    for kind in (CheckpointError, OwnError, RlbatchError):

        def fail(kind: type[RlbatchError] = kind) -> None:
            raise kind("words")

        try:
            on_first_rank(fail)
        except RlbatchError as error:
            found.append((type(error).__name__, str(error)))
    return [*found, gathered({"rank": dist.get_rank(), "long": "x" * (100 * dist.get_rank())})]


def test_every_rank_gets_the_same(rank_pool) -> None:
    """Values and paths as they are; errors by their class of the API, with their words; texts of any length."""
    for *found, told in rank_pool(2).run(answers):
        assert found == [*VALUES, ("CheckpointError", "words"), ("ConfigError", "words"), ("RlbatchError", "words")]
        assert told == [{"rank": 0, "long": ""}, {"rank": 1, "long": "x" * 100}]


@pytest.mark.parametrize("folder", ["rlbatch", "plugins"])
def test_no_collective_of_pickles(folder: str, repository: Path) -> None:
    """torch's collectives of objects unpickle what comes."""
    for path in (repository / folder).rglob("*.py"):
        assert not re.search(r"(gather|broadcast|scatter|send|recv)_object", path.read_text(encoding="utf-8")), path
