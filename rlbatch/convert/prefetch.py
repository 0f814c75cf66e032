"""Parts of a file, made by several threads before it is their turn: reading, rounding and writing go on at the same time, on all cores."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from rlbatch.convert.block_file import Part

AHEAD_BYTES = 64 * 2**20
"""Jobs that make more are done when it is their turn, by the thread that asks."""
MOST_THREADS = 4


@dataclass(frozen=True)
class Job:
    """Some of a file.

    Attributes:
        nbytes: What it makes.
        parts: Makes it, by any thread; every part has memory of its own.
    """

    nbytes: int
    parts: Callable[[], Iterator[Part]]


def made_ahead(jobs: Iterable[Job], threads: int) -> Iterator[Part]:
    """The parts of jobs, in their order; at most three small jobs a thread are in memory.

    Args:
        jobs: All of a file.
        threads: That make parts; each uses one core.
    """
    threads, torch_threads = min(threads, MOST_THREADS), torch.get_num_threads()
    waiting: deque[Future[list[Part]]] = deque()
    pool = ThreadPoolExecutor(threads, "rlbatch-convert", initializer=torch.set_num_threads, initargs=(1,))
    try:
        for job in jobs:
            if job.nbytes <= AHEAD_BYTES:
                waiting.append(pool.submit(list, job.parts()))
                if len(waiting) > 2 * threads:
                    yield from waiting.popleft().result()
                continue
            while waiting:
                yield from waiting.popleft().result()
            yield from job.parts()
        while waiting:
            yield from waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(torch_threads)  # what later threads begin with
