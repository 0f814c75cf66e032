"""Measures seconds and memory of a step's phases."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from rlbatch.metrics.gpu_memory import GpuMemory


class PhaseClock:
    """Adds up the seconds of named phases. A phase ends when its kernels have: the next one starts with an idle GPU.

    Attributes:
        memory: Of the phases.
    """

    def __init__(self) -> None:
        """Starts the clock."""
        self._started = time.perf_counter()
        self._seconds: dict[str, float] = {}
        self.memory = GpuMemory()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Times a block; a name may come again."""
        started = time.perf_counter()
        with self.memory.phase(name):
            yield
            if torch.cuda.is_available():
                torch.cuda.synchronize()
        self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - started

    def total(self) -> float:
        """Seconds since the clock was made."""
        return time.perf_counter() - self._started

    def seconds(self, *names: str) -> float:
        """Seconds of some phases together."""
        return sum(self._seconds.get(name, 0.0) for name in names)

    def tags(self) -> dict[str, float]:
        """``time/<phase>_s`` for each phase."""
        return {f"time/{name}_s": value for name, value in self._seconds.items()}
