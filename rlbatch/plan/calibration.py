"""What runs say of the plan: which values of ``plan.assume`` would have made it right.

A time is corrected by a factor, of each phase one; activations too. What a GPU or a node uses beyond what is counted is added to what CUDA
and NCCL, or the operating system, take there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from rlbatch.config.assumptions import CORRECTIONS, AssumeConfig
from rlbatch.config.schema import Config
from rlbatch.plan.accounting import STEP_PHASES, Table
from rlbatch.plan.job_plan import JobPlan

FACTORS = {"sync": "sync_factor", "rollout": "generate_factor", "logprobs": "logprobs_factor", "update": "update_factor"}
"""A step's phase -> the assumption that corrects its time."""
ACTIVATIONS = "activations_factor"
LEAST_GIB = 0.5
"""Activations of less say nothing of larger ones."""
LEAST_S = 0.01


@dataclass(frozen=True)
class Measured:
    """What a run recorded beside its plan.

    Attributes:
        seconds: Of a step's phases, medians.
        memory: Phase -> ``gpu``, ``trainer`` and ``node``, GiB, of rank 0.
        prompt, response: Mean tokens.
    """

    seconds: Mapping[str, float]
    memory: Mapping[str, Mapping[str, float]]
    prompt: float
    response: float


def uncalibrated(config: Config, measured: Measured) -> Config:
    """The run's config as a plan would have it that knows how long its samples are, and that nothing has corrected."""
    plain = {name: getattr(AssumeConfig(), name) for name in (*FACTORS.values(), ACTIVATIONS, *config.plan.calibrated)}
    lengths = {"mean_prompt_tokens": max(round(measured.prompt), 1), "mean_response_tokens": max(round(measured.response), 1)}
    return replace(config, plan=replace(config.plan, assume=replace(config.plan.assume, **plain, **lengths), calibrated={}))


def factors(plan: JobPlan, table: Table, measured: Measured) -> dict[str, float]:
    """Assumption -> the value with which times and activations would have been right.

    Args:
        plan: Of the run, ``uncalibrated``.
        table: Its memory, phase by phase.
        measured: What the run recorded.
    """
    found: dict[str, float] = {}
    for phase, name in FACTORS.items():
        planned, took = plan.time.phases[STEP_PHASES[phase]] if plan.time else 0.0, measured.seconds.get(phase, 0.0)
        if min(planned, took) >= LEAST_S:
            found[name] = _factor(took / planned)
    update, took_gib = table["update"].get("trainer", {}), measured.memory.get("update", {}).get("trainer", 0.0)
    if update and took_gib and (counted := update["planned"] - update["at_least"]) >= LEAST_GIB:
        found[ACTIVATIONS] = _factor((took_gib - update["at_least"]) / counted)
    return found


def added(assume: AssumeConfig, table: Table, measured: Measured) -> dict[str, float]:
    """The same of what has a size of its own, where ``factors`` are in the plan already."""
    over = {"cuda_gib": _over(table, measured, "gpu", "trainer"), "node_gib": _over(table, measured, "node")}
    return {name: max(getattr(assume, name) + gib, 0.0) for name, gib in over.items() if gib is not None}


def combined(each: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Of several runs: medians of factors, and of memory that is not in one's power the most."""
    names = dict.fromkeys(name for one in each for name in one)
    values = {name: [one[name] for one in each if name in one] for name in names}
    return {name: round(max(found) if name.endswith("_gib") else median(found), 4) for name, found in values.items()}


def _over(table: Table, measured: Measured, what: str, less: str = "") -> float | None:
    """By how much one uses more than planned, at most, GiB; ``less`` is a part of it that is corrected otherwise. None: nobody measured."""
    names = [what, less] if less else [what]
    found = []
    for phase, rows in table.items():
        took = measured.memory.get(phase, {})
        if all(name in rows and name in took for name in names):
            first, *others = (took[name] - rows[name]["planned"] for name in names)
            found.append(first - sum(others))
    return max(found, default=None)


def _factor(value: float) -> float:
    return min(max(value, CORRECTIONS.least), CORRECTIONS.most)
