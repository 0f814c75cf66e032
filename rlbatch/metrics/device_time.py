"""Shows where the time of a profiled step went: by phase, module and kind of work, from the events of ``torch.profiler``.

Work of a backward pass belongs to the module whose forward pass it undoes: autograd gives both the same sequence number.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

MODULE, PHASE = "module ", "phase "
"""Prefixes of the names of ranges (``torch.profiler.record_function``)."""
ELSEWHERE = "elsewhere"
KINDS = {
    "communication": r"nccl|gloo|c10d|all_?gather|all_?reduce|reduce_?scatter|all_?to_?all|SendRecv|deepep",
    "attention": r"fmha|flash|attention|cudnn.*(sdpa|attn)|sdpa",
    "matrix products": r"gemm|nvjet|cutlass|cublas|splitK|grouped_mm|::(add|b?add|b)?mm$|::mv$|matmul|_wgrad|gemv",
    "optimizer": r"multi_tensor|adam|foreach",
    "copies": r"[Mm]emcpy|[Mm]emset|copy_",
}
"""Kind of work -> pattern of the names of kernels (on CPUs, of operations); the first match counts, and all others are element-wise."""
OTHER = "element-wise"
Interval = tuple[int, int]


@dataclass(frozen=True)
class Work:
    """A kernel, or on CPUs an operation without those that it calls.

    Attributes:
        name: Name of the kernel.
        phase: Phase of the step; empty between phases.
        module: Module whose forward or backward pass the work belongs to.
        start: Start, nanoseconds.
        duration: Duration, nanoseconds.
    """

    name: str
    phase: str
    module: str
    start: int
    duration: int

    @property
    def kind(self) -> str:
        """Kind of the work: a key of ``KINDS``, or ``OTHER``."""
        return next((kind for kind, pattern in KINDS.items() if re.search(pattern, self.name)), OTHER)


@dataclass(frozen=True)
class DeviceTime:
    """The work of a device in a step.

    Attributes:
        work: All kernels, or operations.
        phases: Name, start and end of each phase, nanoseconds.
    """

    work: Sequence[Work]
    phases: Sequence[tuple[str, int, int]]

    @classmethod
    def of(cls, events: Iterable[Any]) -> DeviceTime:
        """Builds the record from ``profile.profiler.kineto_results.events()``: kernels if there are any, else the host's operations."""
        everything = list(events)
        kernels = [event for event in everything if event.device_type() == torch.autograd.DeviceType.CUDA]
        operations = [event for event in everything if event.device_type() == torch.autograd.DeviceType.CPU]
        places, own = _places(operations)
        phases = [
            (event.name().removeprefix(PHASE), event.start_ns(), event.start_ns() + event.duration_ns())
            for event in operations
            if event.name().startswith(PHASE)
        ]
        if kernels:
            ranges = (MODULE, PHASE)
            work = [
                Work(event.name(), *places.get(event.linked_correlation_id(), ("", ELSEWHERE)), event.start_ns(), event.duration_ns())
                for event in kernels
                if not event.name().startswith(ranges)
            ]
        else:
            work = [
                Work(event.name(), *places[event.correlation_id()], event.start_ns(), own[event.correlation_id()])
                for event in operations
                if not event.name().startswith((MODULE, PHASE, "autograd::engine"))
            ]
        return cls([one for one in work if one.duration > 0], phases)

    def table(self) -> str:
        """Report with the time by phase, module and kind."""
        return "\n\n".join((self._by_phase(), self._by("module", _label), self._by("kind", lambda work: work.kind)))

    def _by_phase(self) -> str:
        lines = [f"{'phase':<12} {'seconds':>9} {'busy':>6} {'communication':>14} {'exposed':>8} {'idle':>6}"]
        totals: dict[str, int] = defaultdict(int)
        for name, start, end in self.phases:
            totals[name] += end - start
        for name, total in totals.items():
            mine = [work for work in self.work if work.phase == name]
            talk, compute = (
                union((work.start, work.start + work.duration) for work in mine if (work.kind == "communication") == is_talk)
                for is_talk in (True, False)
            )
            busy, talking = length(union([*talk, *compute])), length(talk)
            exposed = busy - length(compute)
            shares = (busy / total, talking / total, exposed / total, 1 - busy / total)
            cells = [f"{share:.0%}" for share in shares]
            lines.append(f"{name:<12} {total / 1e9:>9.3f} {cells[0]:>6} {cells[1]:>14} {cells[2]:>8} {cells[3]:>6}")
        return "\n".join([*lines, EXPLAINED])

    def _by(self, title: str, key: Callable[[Work], str]) -> str:
        times: Counter[str] = Counter()
        for work in self.work:
            times[key(work)] += work.duration
        total = sum(times.values()) or 1
        lines = [f"{title:<60} {'ms':>10} {'share':>6}"]
        return "\n".join(lines + [f"{name:<60} {time / 1e6:>10.1f} {time / total:>6.1%}" for name, time in times.most_common(30)])


EXPLAINED = """\
busy: the device computes or communicates; communication: it does so, and may compute beside it; exposed: it does nothing else, waiting
for slower ranks included (also the bubble of a pipeline); idle: it waits for the host, or for an engine."""


def _label(work: Work) -> str:
    return f"outside of modules, in {work.phase or 'no phase'}" if work.module == ELSEWHERE else work.module


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same time as sorted intervals that do not overlap."""
    joined: list[Interval] = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((start, end))
    return joined


def length(intervals: Iterable[Interval]) -> int:
    """Total length of intervals that do not overlap."""
    return sum(end - start for start, end in intervals)


def _places(operations: Sequence[Any]) -> tuple[dict[int, tuple[str, str]], dict[int, int]]:
    """Two tables by correlation id: phase and module of an operation, and its own nanoseconds without those of operations that it calls."""
    places: dict[int, tuple[str, str]] = {}
    own: dict[int, int] = {}
    of_forward: dict[tuple[int, int], str] = {}
    stacks: dict[int, list[tuple[int, int, str, str]]] = defaultdict(list)  # by thread: end, correlation id, phase, module
    running = ""
    # A range ends with its last operation: the longer one of two that begin together is the outer one.
    for event in sorted(operations, key=lambda event: (event.start_ns(), -event.duration_ns())):
        name, start, end, thread, key = event.name(), event.start_ns(), 0, event.start_thread_id(), event.correlation_id()
        end = start + event.duration_ns()
        stack = stacks[thread]
        while stack and stack[-1][0] <= start:
            stack.pop()
        _, parent, phase, module = stack[-1] if stack else (0, -1, running, ELSEWHERE)
        if name.startswith(PHASE):
            phase = running = name.removeprefix(PHASE)
        elif name.startswith(MODULE):
            module = name.removeprefix(MODULE)
        elif event.sequence_nr() >= 0:
            if event.fwd_thread_id():
                module = of_forward.get((event.fwd_thread_id(), event.sequence_nr()), module)
            else:
                of_forward[thread, event.sequence_nr()] = module
        places[key], own[key] = (phase, module), event.duration_ns()
        if parent in own:
            own[parent] -= event.duration_ns()
        stack.append((end, key, phase, module))
    return places, own
