"""Measures the phases of a step: their seconds, and the memory of this rank's GPU and node."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch.profiler import record_function

from rlbatch.metrics.device_time import PHASE
from rlbatch.metrics.memory_owners import memory_snapshot

GIB = 2**30
SHOWN = ("sync", "rollout", "logprobs", "update")
"""Phases with memory tags of their own."""


class OutOfMemory(Exception):
    """A phase in which the GPU had no memory left.

    Attributes:
        phase: Name of the phase.
        allocated: Peak bytes of tensors in it.
        reserved: Bytes that PyTorch has reserved from the driver.
        used: Bytes that all processes use.
        snapshot: The allocator's records.
    """

    def __init__(self, phase: str, error: torch.OutOfMemoryError) -> None:
        super().__init__(str(error))
        self.phase, self.allocated, self.reserved = phase, torch.cuda.max_memory_allocated(), torch.cuda.memory_reserved()
        free, total = torch.cuda.mem_get_info()
        self.used = total - free
        self.snapshot = memory_snapshot()


class GpuMemory:
    """Measures peaks of memory that PyTorch holds in this process, and memory that all processes use as phases end.

    Args:
        node_used: Returns the memory that all processes use of the node, GiB; None: it is not measured.
    """

    def __init__(self, node_used: Callable[[], float] | None = None) -> None:
        """Starts to measure."""
        self._node_used = node_used
        self._node: dict[str, float] = {}
        self._is_measured = torch.cuda.is_available()
        self._phases: dict[str, float] = {}
        self._used: dict[str, float] = {}
        self._allocated = self._reserved = 0.0
        if self._is_measured:
            torch.cuda.reset_peak_memory_stats()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measures a phase; the same name may occur again."""
        self._take()
        yield
        self._phases[name] = max(self._phases.get(name, 0.0), self._take())
        self._used[name] = max(self._used.get(name, 0.0), self._use())
        if self._node_used:
            self._node[name] = max(self._node.get(name, 0.0), self._node_used())

    def tags(self) -> dict[str, float]:
        """Memory tags of the step, GiB; those of the GPU only if there is one."""
        node = {f"memory/node_used_{name}_gib": self._node[name] for name in SHOWN if name in self._node}
        if not self._is_measured:
            return node
        self._take()
        own = {f"memory/gpu_{name}_gib": self._phases.get(name, 0.0) for name in SHOWN}
        used = {f"memory/gpu_used_{name}_gib": self._used.get(name, 0.0) for name in SHOWN}
        return {**node, **own, **used, "memory/gpu_allocated_gib": self._allocated, "memory/gpu_reserved_gib": self._reserved}

    def _use(self) -> float:
        """Memory of the GPU that all processes use now, with engines, GiB."""
        if not self._is_measured:
            return 0.0
        free, total = torch.cuda.mem_get_info()
        return (total - free) / GIB

    def _take(self) -> float:
        """Peak of allocated memory since the last call, GiB."""
        if not self._is_measured:
            return 0.0
        allocated, reserved = torch.cuda.max_memory_allocated() / GIB, torch.cuda.max_memory_reserved() / GIB
        torch.cuda.reset_peak_memory_stats()
        self._allocated, self._reserved = max(self._allocated, allocated), max(self._reserved, reserved)
        return allocated


class PhaseClock:
    """Adds up the seconds of named phases.

    A phase ends when its kernels end, so that the next one starts with an idle GPU, unless it is not to wait for the work that it began.

    Attributes:
        memory: Measurements of memory in the phases.
    """

    def __init__(self, node_used: Callable[[], float] | None = None, begins: Callable[[str], None] = lambda name: None) -> None:
        """Starts the clock. ``node_used`` is as in ``GpuMemory``; ``begins`` is called with the name of each phase."""
        self._begins = begins
        self._started = time.perf_counter()
        self._seconds: dict[str, float] = {}
        self.memory = GpuMemory(node_used)

    @contextmanager
    def phase(self, name: str, *, waits: bool = True) -> Iterator[None]:
        """Times a phase; the same name may occur again. Raises OutOfMemory where the GPU has no memory left."""
        started = time.perf_counter()
        self._begins(name)
        with record_function(PHASE + name), self.memory.phase(name):
            try:
                yield
            except Exception as error:  # of a plugin's code it is the cause
                full = next((each for each in (error, error.__cause__) if isinstance(each, torch.OutOfMemoryError)), None)
                if full is None or isinstance(error, OutOfMemory):
                    raise
                raise OutOfMemory(name, full) from error
            if waits and torch.cuda.is_available():
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


class PartClock:
    """Measures the seconds of the parts of a job's start."""

    def __init__(self) -> None:
        """Starts the clock."""
        self._started = time.perf_counter()
        self._seconds: dict[str, float] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Times a part."""
        started = time.perf_counter()
        yield
        self._seconds[name] = time.perf_counter() - started

    def told(self) -> str:
        """Text such as ``41.2 s: model 2.1, weights 12.0, engine 26.8``."""
        return f"{time.perf_counter() - self._started:.1f} s: " + ", ".join(f"{name} {each:.1f}" for name, each in self._seconds.items())
