"""What several threads make ahead of its turn comes in order, with bounded memory, and errors come where they belong."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from rlbatch.convert import prefetch
from rlbatch.convert.prefetch import Job, made_ahead


def jobs(sizes: list[int], started: list[int]) -> Iterator[Job]:
    """Each makes its number, twice."""

    def parts(number: int) -> Iterator[bytes]:
        started.append(number)
        yield bytes([number])
        yield bytes([number])

    return (Job(size, lambda number=number: parts(number)) for number, size in enumerate(sizes))


@pytest.mark.parametrize("threads", [1, 2, 8])
@pytest.mark.parametrize("sizes", [[], [1] * 50, [prefetch.AHEAD_BYTES + 1] * 3, [1, 1, 2**30, 1, 1, 1, 2**30]])
def test_order(threads: int, sizes: list[int]) -> None:
    """That of the jobs, small and large ones mixed."""
    before = torch.get_num_threads()
    assert b"".join(made_ahead(jobs(sizes, []), threads)) == bytes(number for job in range(len(sizes)) for number in (job, job))
    assert torch.get_num_threads() == before


def test_memory_is_bounded() -> None:
    """Jobs begin as others are taken, not all at once; a large one begins only when its turn has come, in the thread that asks."""
    started: list[int] = []
    parts = made_ahead(jobs([1] * 40, started), 2)
    assert [next(parts), next(parts)] == [bytes([0]), bytes([0])]
    assert max(started) <= 4
    parts.close()
    assert max(started) <= 4
    asked: list[int] = []

    def large() -> Iterator[bytes]:
        asked.append(threading.get_ident())
        yield b"large"

    parts = made_ahead([Job(1, lambda: iter([b"small"])), Job(2**30, large)], 2)
    assert next(parts) == b"small" and not asked
    assert next(parts) == b"large" and asked == [threading.get_ident()]


def test_errors_come_in_order() -> None:
    """After what was made before the job that fails; nothing comes after it."""

    def failing() -> Iterator[bytes]:
        raise ValueError("damaged")
        yield b""

    parts = made_ahead([Job(1, lambda: iter([b"first"])), Job(1, failing), Job(1, lambda: iter([b"last"]))], 2)
    assert next(parts) == b"first"
    with pytest.raises(ValueError, match="damaged"):
        next(parts)
    assert list(parts) == []
