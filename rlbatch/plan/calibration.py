"""Corrects a plan with measurements of runs: finds the values of ``plan.assume`` with which it would have been right.

The time of each phase is corrected by a factor, and so are activations. Memory beyond the planned is added to what CUDA and NCCL take of
a GPU, or the operating system of a node.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from rlbatch.config.assumptions import CORRECTIONS, AssumeConfig
from rlbatch.config.schema import Config
from rlbatch.plan.accounting import STEP_PHASES, Table
from rlbatch.plan.engine_memory import GIB
from rlbatch.plan.estimate import DIVIDED
from rlbatch.plan.job_plan import JobPlan

FACTORS = {"sync": "sync_factor", "rollout": "generate_factor", "logprobs": "logprobs_factor", "update": "update_factor"}
"""Phase of a step -> name in ``plan.assume`` of the factor that corrects its time."""
ACTIVATIONS = "activations_factor"
LEAST_GIB = 0.5
"""Smallest planned size of activations that is calibrated, GiB; smaller ones say nothing about larger ones."""
LEAST_S = 0.01


@dataclass(frozen=True)
class Measured:
    """Measurements that a run recorded beside its plan.

    Attributes:
        seconds: Phase of a step -> median duration, seconds.
        memory: Phase -> ``gpu``, ``trainer`` or ``node`` -> memory of rank 0, GiB.
        prompt, response: Mean lengths, tokens.
    """

    seconds: Mapping[str, float]
    memory: Mapping[str, Mapping[str, float]]
    prompt: float
    response: float


def uncalibrated(config: Config, measured: Measured) -> Config:
    """The run's config with the measured sample lengths and without corrections of earlier runs."""
    plain = {name: getattr(AssumeConfig(), name) for name in (*FACTORS.values(), ACTIVATIONS, *config.plan.calibrated)}
    lengths = {"mean_prompt_tokens": max(round(measured.prompt), 1), "mean_response_tokens": max(round(measured.response), 1)}
    return replace(config, plan=replace(config.plan, assume=replace(config.plan.assume, **plain, **lengths), calibrated={}))


def factors(plan: JobPlan, table: Table, measured: Measured) -> dict[str, float]:
    """The factors with which planned times and activations would have been right, by their name in ``plan.assume``.

    Args:
        plan: Plan of the ``uncalibrated`` config.
        table: Planned memory of that plan, by phase.
        measured: Measurements of the run.
    """
    found: dict[str, float] = {}
    for phase, name in FACTORS.items():
        planned, took = plan.time.phases[STEP_PHASES[phase]] if plan.time else 0.0, measured.seconds.get(phase, 0.0)
        if min(planned, took) >= LEAST_S:
            found[name] = _factor(took / planned)
    update, took_gib = table["update"].get("trainer", {}), measured.memory.get("update", {}).get("trainer", 0.0)
    others = update.get("at_least", 0.0) + plan.memory.expected.stages[0].gpu["update"].get(DIVIDED, 0.0) / GIB
    if update and took_gib and (counted := update["planned"] - others) >= LEAST_GIB:
        found[ACTIVATIONS] = _factor((took_gib - others) / counted)
    return found


def added(assume: AssumeConfig, table: Table, measured: Measured) -> dict[str, float]:
    """Sizes in GiB, by name in ``plan.assume``, with which planned memory would have been right once ``factors`` are in the plan."""
    over = {"cuda_gib": _over(table, measured, "gpu", "trainer"), "node_gib": _over(table, measured, "node")}
    return {name: max(getattr(assume, name) + gib, 0.0) for name, gib in over.items() if gib is not None}


def combined(each: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Joins the corrections of several runs: the median of each factor, and the largest of each memory size."""
    names = dict.fromkeys(name for one in each for name in one)
    values = {name: [one[name] for one in each if name in one] for name in names}
    return {name: round(max(found) if name.endswith("_gib") else median(found), 4) for name, found in values.items()}


def _over(table: Table, measured: Measured, what: str, less: str = "") -> float | None:
    """Largest excess over the planned memory of ``what`` in any phase, GiB, without the excess of ``less``; None if it was not measured."""
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
