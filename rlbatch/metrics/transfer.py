"""Progress of reading or writing many bytes: amount, rate and what is left, in a line every few seconds."""

from __future__ import annotations

import time
from collections.abc import Callable

from rlbatch.metrics.progress import format_seconds

INTERVAL_S = 10.0
"""Between two lines; what takes less is silent."""
GB = 1e9


class Transfer:
    """Counts bytes and tells of them.

    Args:
        what: Begins every line, e.g. ``reading /models/Qwen3-30B-A3B``.
        total_bytes: Of the whole.
        announce: Told a line.
        clock: Seconds.
    """

    def __init__(self, what: str, total_bytes: int, announce: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._what, self._total, self._announce, self._clock = what, total_bytes, announce, clock
        self._done = 0
        self._begun = self._told = clock()

    def add(self, nbytes: int) -> None:
        """Counts bytes that are done."""
        self._done += nbytes
        now = self._clock()
        if now - self._told >= INTERVAL_S:
            self._told = now
            rate = self._done / (now - self._begun)
            left = format_seconds((self._total - self._done) / rate) if rate else "-"
            self._announce(f"{self._what}: {self._done / GB:.1f} of {self._total / GB:.1f} GB, {rate / GB:.2f} GB/s, {left} left")

    def close(self) -> None:
        """Tells of the whole, if anything was told before."""
        if self._told > self._begun:
            seconds = self._clock() - self._begun
            self._announce(f"{self._what}: {self._done / GB:.1f} GB in {format_seconds(seconds)}, {self._done / seconds / GB:.2f} GB/s")
