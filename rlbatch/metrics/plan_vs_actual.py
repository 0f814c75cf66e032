"""Compares the steps of a run with its plan."""

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
"""Phase whose seconds are planned -> tags whose sum measures it."""
MEMORY = {"gpu": "memory/gpu_used_{phase}_gib", "trainer": "memory/gpu_{phase}_gib", "node": "memory/node_used_{phase}_gib"}
PREFIX = "plan_vs_actual/"


class PlanVsActual:
    """The comparison of planned and measured values, for summary.json and as tags of each step.

    Attributes:
        table: ``machine``; ``samples`` of a step; and ``tokens`` (of a prompt, a response), ``seconds`` and ``memory``, each with values
            ``planned`` and ``measured``: the mean of all steps, the median of all but the slow first one, and the maximum, in this order.
    """

    def __init__(self, plan: Mapping[str, Any]) -> None:
        """Starts with the planned table, which has no ``measured`` values."""
        self.table: dict[str, Any] = deepcopy(dict(plan))
        self._seen: dict[tuple[str, str], list[float]] = {}

    def record(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Adds a step, and returns its tags: measured values divided by planned ones."""
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
