"""Fixtures that every test may use."""

from __future__ import annotations

import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Whatever the machine's habit: a rank that compiles all of rlbatch anew takes a sixth longer to start, a light process a half.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

from rlbatch.rank_pools import RankPools
from tests.leftovers import STARTED
from tests.long_tail import changed_since, concerned

sys.dont_write_bytecode = False
pytest.register_assert_rewrite("tests.plugins.engine_contract")  # it is no test file, but has tests in it

ROOT = Path(__file__).resolve().parent.parent
DURATIONS = ROOT / "tests" / "durations.txt"
"""Seconds of the longest files, in a run of all on two processors, as such a run prints them at its end."""
LONG_S, MANY = 20.0, 100
"""Seconds of a file, and files of a run, from which on they are printed."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--changed-since", metavar="COMMIT", help="of tests marked long, those of whose files one changed since a commit")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out tests of the long tail of which nothing changed. Processes that share the tests (``-n 2``) begin with the long files."""
    if commit := config.getoption("--changed-since"):
        chosen = concerned(items, changed_since(str(commit)))
        config.hook.pytest_deselected(items=list(set(items) - set(chosen)))
        items[:] = chosen
    if hasattr(config, "workerinput"):
        lines = [line.split() for line in DURATIONS.read_text().splitlines()]
        seconds = {ROOT / path: float(number) for number, path in lines}
        items.sort(key=lambda item: (-seconds.get(item.path, 0.0), item.path))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Says how long the longest files took."""
    seconds = Counter[str]()
    for report in (report for reports in terminalreporter.stats.values() for report in reports if hasattr(report, "duration")):
        seconds[report.nodeid.partition("::")[0]] += report.duration
    if len(seconds) >= MANY:
        terminalreporter.section("seconds by file")
        for path, number in seconds.most_common():
            if number >= LONG_S:
                terminalreporter.write_line(f"{round(number, -1):.0f} {path}")


@pytest.fixture(autouse=True)
def _broken_pipes_are_errors() -> Iterator[None]:
    """Commands let SIGPIPE end their process; the tests that call them in this one live on."""
    previous = signal.getsignal(signal.SIGPIPE)
    yield
    signal.signal(signal.SIGPIPE, previous)


@pytest.fixture(autouse=True)
def _runs_end_with_their_test() -> Iterator[None]:
    yield
    while STARTED:
        STARTED.pop().kill()


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
