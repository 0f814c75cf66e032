"""Fills tensors from files in a few threads: some read while others check, convert and copy what they have read."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import torch

THREADS = 4
"""Threads that fill, each with its own memory for what it reads; with two the disk would wait whenever both compute."""

Result = TypeVar("Result")


class Threads:
    """A few threads, and with them their memory, for as long as there is something to fill."""

    def __init__(self) -> None:
        # A new thread's device is the first.
        start = partial(torch.cuda.set_device, torch.cuda.current_device()) if torch.cuda.is_available() else None
        self._pool = ThreadPoolExecutor(THREADS, "rlbatch-fill", start)

    def __enter__(self) -> Threads:
        """Returns itself."""
        return self

    def __exit__(self, *error: Any) -> None:
        """Waits for the jobs that have begun."""
        self._pool.shutdown(cancel_futures=True)

    def run(self, jobs: Iterable[Callable[[], Result]]) -> Iterator[Result]:
        """Results in the order of the jobs, which are taken as threads get free.

        Args:
            jobs: Independent of each other.

        Raises:
            BaseException: of the first job that failed.
        """
        begun: deque[Future[Result]] = deque()
        for job in jobs:
            begun.append(self._pool.submit(job))
            if len(begun) > THREADS:
                yield begun.popleft().result()
        while begun:
            yield begun.popleft().result()
