"""Peaks of a step's phases; torch's counters of a GPU are simulated."""

from __future__ import annotations

import re

import pytest
import torch

from rlbatch.api import PluginError
from rlbatch.metrics.phases import GIB, SHOWN, GpuMemory, OutOfMemory, PartClock, PhaseClock


class Counters:
    """Memory that grows and shrinks, and its peak since the last reset; the reserved memory is twice as much."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.peak = self.engine = 0.0
        for name, value in (
            ("is_available", lambda: True),
            ("max_memory_allocated", lambda: self.peak * GIB),
            ("max_memory_reserved", lambda: 2 * self.peak * GIB),
            ("mem_get_info", lambda: (int((80 - self.now - 30 - self.engine) * GIB), 80 * GIB)),
            ("reset_peak_memory_stats", self.reset),
        ):
            monkeypatch.setattr(torch.cuda, name, value)

    def set(self, gib: float) -> None:
        self.now, self.peak = gib, max(self.peak, gib)

    def reset(self) -> None:
        self.peak = self.now


def test_each_phase_has_its_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a phase that comes twice the larger one; the step's is the largest of all, phases or not; other processes count as used."""
    counters = Counters(monkeypatch)
    counters.set(90.0)  # before the step
    counters.set(4.0)
    memory = GpuMemory()
    for peaks in ([8.0, 2.0], [5.0, 2.0]):
        with memory.phase("sync"):
            for gib in peaks:
                counters.set(gib)
    for engine in (10.0, 0.0):  # it generates, then it sleeps
        with memory.phase("rollout"):
            counters.engine = engine
    counters.set(20.0)  # between phases
    counters.set(3.0)
    with memory.phase("update"):
        counters.set(16.0)
    assert memory.tags() == {
        "memory/gpu_sync_gib": 8.0,
        "memory/gpu_rollout_gib": 2.0,
        "memory/gpu_logprobs_gib": 0.0,
        "memory/gpu_update_gib": 16.0,
        "memory/gpu_allocated_gib": 20.0,
        "memory/gpu_reserved_gib": 40.0,
        "memory/gpu_used_sync_gib": 32.0,
        "memory/gpu_used_rollout_gib": 42.0,
        "memory/gpu_used_logprobs_gib": 0.0,
        "memory/gpu_used_update_gib": 46.0,
    }


def test_without_a_gpu_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tag, and no call of CUDA."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    memory = GpuMemory()
    for name in SHOWN:
        with memory.phase(name):
            pass
    assert memory.tags() == {}


def test_the_nodes_memory_is_measured_without_a_gpu_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the end of each phase; the most of those that come twice."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    used = iter([3.0, 7.0, 5.0, 9.0])
    memory = GpuMemory(lambda: next(used))
    for name in ("sync", "rollout", "rollout", "exchange"):
        with memory.phase(name):
            pass
    assert memory.tags() == {"memory/node_used_sync_gib": 3.0, "memory/node_used_rollout_gib": 7.0}


def test_a_gpu_without_memory_is_told_with_its_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    """And with what was there then: in the innermost phase."""
    counters, clock = Counters(monkeypatch), PhaseClock()
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: int(12 * GIB))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    with pytest.raises(OutOfMemory, match="Tried to allocate 2") as caught, clock.phase("rollout"), clock.phase("update"):
        counters.set(11.0)
        counters.set(1.0)
        raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB")
    error = caught.value
    assert (error.phase, error.allocated, error.reserved, error.used) == ("update", 11 * GIB, 12 * GIB, 31 * GIB)
    with pytest.raises(OutOfMemory) as caught, clock.phase("offload"):
        raise PluginError("mine raised it") from torch.OutOfMemoryError("Tried to allocate 1.00 GiB")
    assert (caught.value.phase, str(caught.value)) == ("offload", "Tried to allocate 1.00 GiB")
    with pytest.raises(PluginError), clock.phase("offload"):
        raise PluginError("mine raised something else")


def test_the_parts_of_a_start_are_told_in_order() -> None:
    """One line with the whole and each part; one that failed has no number."""
    clock = PartClock()
    with clock.part("model"):
        pass
    with pytest.raises(KeyError), clock.part("weights"):
        raise KeyError("gone")
    with clock.part("engine"):
        pass
    assert re.fullmatch(r"\d+\.\d s: model \d+\.\d, engine \d+\.\d", clock.told())
