"""Files are read in a few threads, in order and no further ahead than they get free."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from rlbatch.weights.filling import THREADS, Threads


def test_order_and_how_far_ahead() -> None:
    """Results come as the jobs were given, from more than one thread; few are begun whose results nobody has taken."""
    begun, together = 0, threading.Barrier(THREADS)

    def jobs() -> Iterator[Callable[[], tuple[int, str]]]:
        nonlocal begun
        for number in range(2 * THREADS * 5):
            begun += 1
            yield lambda number=number: (together.wait(30), number, threading.current_thread().name)[1:]

    with Threads() as threads:
        found = []
        for number, name in threads.run(jobs()):
            found.append((number, name))
            assert begun <= number + THREADS + 1
    assert [number for number, _ in found] == list(range(2 * THREADS * 5))
    assert len({name for _, name in found}) == THREADS


def test_the_first_error_is_told() -> None:
    """In the order of the jobs, and what did not begin never does."""
    ran = []

    def job(number: int) -> None:
        ran.append(number)
        if number in (3, 4):
            raise ValueError(f"job {number}")

    with pytest.raises(ValueError, match="job 3"), Threads() as threads:
        for _ in threads.run((lambda number=number: job(number)) for number in range(100)):
            pass
    assert max(ran) <= 3 + THREADS + 1
