"""Fixtures that every test may use."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from rlbatch.testing.ranks import RankPools

pytest.register_assert_rewrite("tests.plugins.engine_contract")  # it is no test file, but has tests in it

ROOT = Path(__file__).resolve().parent.parent


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Processes that share the tests (``-n 2``) begin with the long files, of jobs and engines, and end together with short ones."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: ("cluster" in item.path.parts, item.path), reverse=True)


@pytest.fixture(autouse=True)
def _broken_pipes_are_errors() -> Iterator[None]:
    """Commands let SIGPIPE end their process; the tests that call them in this one live on."""
    previous = signal.getsignal(signal.SIGPIPE)
    yield
    signal.signal(signal.SIGPIPE, previous)


@pytest.fixture(scope="session")
def repository() -> Path:
    """The checkout's root folder."""
    return ROOT


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[RankPools]:
    """``rank_pool(2).run(function, *args)`` calls a module-level function on 2 gloo ranks, in processes that the session shares."""
    pools = RankPools()
    yield pools
    pools.close()
