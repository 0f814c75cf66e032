"""A run beside its plan: what was planned of a step, and what its steps measure."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from statistics import fmean, median
from typing import Any

TIMES = {
    "sync": ("time/sync_s", "time/offload_s"),
    "rollout": ("time/rollout_s",),
    "logprobs": ("time/logprobs_s",),
    "update": ("time/update_s",),
    "step": ("time/step_s",),
}
"""Phases whose seconds are planned, and what measures them."""
MEMORY = {"gpu": "memory/gpu_used_{phase}_gib", "trainer": "memory/gpu_{phase}_gib", "node": "memory/node_used_{phase}_gib"}
PREFIX = "plan_vs_actual/"


class PlanVsActual:
    """What summary.json has of it, and each step's tags.

    Attributes:
        table: ``machine``; ``samples`` of a step; of ``tokens`` (a prompt, a response), ``seconds`` and ``memory``, what is ``planned`` and
            what was ``measured``: means of all steps, medians of all but the first, which is slower, and the most.
    """

    def __init__(self, plan: Mapping[str, Any]) -> None:
        """Begins with what was planned: the table, without ``measured``."""
        self.table: dict[str, Any] = deepcopy(dict(plan))
        self._seen: dict[tuple[str, str], list[float]] = {}

    def record(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Adds a step, and returns its tags: what was measured over what was planned."""
        if not self.table or "time/step_s" not in metrics:
            return {}
        found: dict[str, float] = {}
        for phase, tags in TIMES.items():
            if tags[0] in metrics:
                seconds = sum(metrics.get(tag, 0.0) for tag in tags)
                found |= self._put("seconds", phase, f"{phase}_s", seconds)
        if {"perf/tokens_per_s", "response/length_mean"} <= set(metrics):
            sample = metrics["perf/tokens_per_s"] * metrics["time/step_s"] / self.table["samples"]
            self._put("tokens", "response", "", metrics["response/length_mean"])
            self._put("tokens", "prompt", "", sample - metrics["response/length_mean"])
        for phase, rows in self.table["memory"].items():
            for what, row in rows.items():
                if (tag := MEMORY[what].format(phase=phase)) in metrics:
                    row["measured"] = max(row.get("measured", 0.0), metrics[tag])
                    found |= _ratio(f"{what}_{phase}", metrics[tag], row)
        return found

    def _put(self, section: str, name: str, tag: str, value: float) -> dict[str, float]:
        row, seen = self.table[section].setdefault(name, {}), self._seen.setdefault((section, name), [])
        seen.append(value)
        row["measured"] = median(seen[1:] or seen) if section == "seconds" else fmean(seen)
        return _ratio(tag, value, row) if tag else {}


def _ratio(tag: str, value: float, row: Mapping[str, float]) -> dict[str, float]:
    return {PREFIX + tag: value / row["planned"]} if row.get("planned") else {}
