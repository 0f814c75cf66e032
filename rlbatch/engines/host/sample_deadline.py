"""How long an engine may take for a sample, where the time in its queue does not count and the engine does not say when it begins."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class SampleDeadline:
    """With the samples of a generation, all given to an engine at once.

    Of those that are in work the one that began last has begun when another one ended, or with the generation. So if none takes longer than
    the limit, one ends at least as often; however many wait.

    Args:
        limit_s: Longest time for one sample.
    """

    def __init__(self, limit_s: float) -> None:
        self.limit_s, self._last = limit_s, 0.0

    async def wait(self, sample: Coroutine[Any, Any, T]) -> T:
        """The sample.

        Raises:
            asyncio.TimeoutError: none has ended for so long; it was cancelled.
        """
        clock = asyncio.get_running_loop().time
        began, task = clock(), asyncio.ensure_future(sample)
        try:
            while not task.done():
                left = max(began, self._last) + self.limit_s - clock()
                if left <= 0:
                    raise asyncio.TimeoutError
                await asyncio.wait([task], timeout=left)
            self._last = clock()
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait([task])
