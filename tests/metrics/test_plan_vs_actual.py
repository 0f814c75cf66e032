"""A run beside its plan: what summary.json and each step have of it."""

from __future__ import annotations

import pytest

from rlbatch.metrics.plan_vs_actual import PlanVsActual

PLAN = {
    "machine": {"device": "NVIDIA H200"},
    "samples": 8,
    "tokens": {"prompt": {"planned": 100.0}, "response": {"planned": 400.0}},
    "seconds": {"sync": {"planned": 2.0}, "update": {"planned": 4.0}, "logprobs": {"planned": 0.0}},
    "memory": {"update": {"gpu": {"planned": 70.0, "at_least": 60.0}, "node": {"planned": 9.0, "at_least": 5.0}}},
}


def metrics(update: float, gib: float, **more: float) -> dict[str, float]:
    times = {"time/step_s": 10.0, "time/sync_s": 0.5, "time/offload_s": 0.5, "time/logprobs_s": 0.1, "time/update_s": update}
    return {**times, "memory/gpu_used_update_gib": gib, "perf/tokens_per_s": 400.0, "response/length_mean": 450.0, **more}


def test_steps_stand_beside_their_plan() -> None:
    """The first step is slower and counts in no time; of memory the most counts, of lengths the mean."""
    both = PlanVsActual(PLAN)
    assert both.record({"reward/eval": 1.0}) == {}
    tags = [both.record(metrics(update, gib)) for update, gib in ((40.0, 71.0), (5.0, 77.0), (6.0, 63.0), (7.0, 70.0))]
    assert tags[1] == {"plan_vs_actual/sync_s": 0.5, "plan_vs_actual/update_s": 1.25, "plan_vs_actual/gpu_update": pytest.approx(1.1)}
    assert both.table["seconds"] == {
        "sync": {"planned": 2.0, "measured": 1.0},
        "update": {"planned": 4.0, "measured": 6.0},
        "logprobs": {"planned": 0.0, "measured": 0.1},
        "step": {"measured": 10.0},
    }
    assert both.table["tokens"] == {"prompt": {"planned": 100.0, "measured": 50.0}, "response": {"planned": 400.0, "measured": 450.0}}
    assert both.table["memory"]["update"] == {
        "gpu": {"planned": 70.0, "at_least": 60.0, "measured": 77.0},
        "node": {"planned": 9.0, "at_least": 5.0},
    }
    assert "measured" not in PLAN["seconds"]["update"]  # type: ignore[index]


def test_without_a_plan_there_is_nothing_beside() -> None:
    """As of a run that only evaluates."""
    assert PlanVsActual({}).record(metrics(1.0, 1.0)) == {}
