"""What a job takes of memory beside what was planned: phase by phase of a step, and by component where there was too little."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from rlbatch.plan.advice import cheapest_relief
from rlbatch.plan.engine_memory import GIB
from rlbatch.plan.estimate import MemoryEstimate
from rlbatch.plan.job_plan import JobPlan
from rlbatch.plan.memory import STATE, WHEN, Parts
from rlbatch.registry import Registry

STEP_PHASES = {"sync": "sync", "rollout": "generate", "logprobs": "log-probs", "update": "update"}
"""A step's phases, as its tags call them -> the plan's."""
OTHER_PHASES = {"restart": "sync", "reward": "generate"}
"""Those without a tag of memory; in the rest, engines sleep."""
TENSORS = "activations and other tensors"
OTHERS = "engine, CUDA and NCCL"
COMPONENTS = {"weights": "weights", "gradients": "gradients", "fragmentation": "fragmentation", **dict.fromkeys(STATE, "optimizer state")}
"""Parts of the plan that have a component of their own."""
_ASKED = re.compile(r"Tried to allocate ([\d.]+) ([MG]iB)")

Table = dict[str, dict[str, dict[str, float]]]


def planned_memory(memory: MemoryEstimate, nodes: Sequence[int], *, on_gpu: bool) -> Table:
    """What is expected in each phase of a step, and of it what is certainly held, GiB: of rank 0's ``gpu``, of the ``trainer`` there, and
    of the ``node`` that takes most. ``nodes`` are the ranks of each.
    """
    table: Table = {}
    for name, phase in STEP_PHASES.items():
        rows = {}
        for what, floor in (("planned", memory.expected), ("at_least", memory.floor)):
            parts = floor.stages[0].gpu[phase]
            own = {part: size for part, size in parts.items() if part != "fragmentation" and not part.startswith(("engine's", "CUDA"))}
            found = {"gpu": sum(parts.values()) / GIB, "trainer": sum(own.values()) / GIB} if on_gpu else {}
            rows[what] = {**found, "node": floor.fullest_host(nodes, [phase]).gib}
        table[name] = {kind: {what: row[kind] for what, row in rows.items()} for kind in rows["planned"]}
    return table


def out_of_memory(
    plan: JobPlan, registry: Registry, rank: int, name: str, taken: Parts, said: str, owners: Sequence[tuple[str, int]] = ()
) -> str:
    """What is told of a rank whose GPU has no memory left.

    Args:
        plan: Of the job.
        registry: Its plugins.
        rank: Whose GPU it is.
        name: Phase of the step.
        taken: Component -> bytes.
        said: What torch said.
        owners: Lines of code that hold most of it, and their bytes.

    Returns:
        The component that outgrew its plan most, all of them, who holds most, and the cheapest change with which the phase takes so much
        less.
    """
    phase = STEP_PHASES.get(name, OTHER_PHASES.get(name, "log-probs"))
    stages = plan.memory.expected.stages
    stage = rank * len(stages) // plan.job.config.layout.world_size
    planned = _components(stages[stage].gpu[phase], has_process=plan.job.has_process)
    over = {each: (taken.get(each, 0.0) - planned.get(each, 0.0)) / GIB for each in {*taken, *planned}}
    worst = max(over, key=lambda each: over[each])
    shown = sorted(over, key=lambda each: -max(taken.get(each, 0.0), planned.get(each, 0.0)))
    each_one = ", ".join(f"{each} {taken.get(each, 0.0) / GIB:.1f} ({planned.get(each, 0.0) / GIB:.1f})" for each in shown)
    asked = _ASKED.search(said)
    lacks = float(asked[1]) / (1024 if asked[2] == "MiB" else 1) if asked else 0.0
    change = cheapest_relief(plan, registry, phase, lacks)
    fix = f"Use {change}" if change else "Use sizes that divide the model further, or more GPUs (layout.world_size)"
    held = f"Of torch's, GiB: {', '.join(f'{line} {size / GIB:.1f}' for line, size in owners)}. " if owners else ""
    more = f", and asked for {lacks:.2f} GiB more" if asked else ""
    return (
        f"layout.world_size={plan.job.config.layout.world_size}: rank {rank}'s GPU has no memory left {WHEN[phase]}: {worst} took "
        f"{over[worst]:+.1f} GiB beside what was planned{more}. GiB taken (planned): {each_one}. "
        f"{held}{fix}."
    )


def _components(parts: Parts, *, has_process: bool) -> Mapping[str, float]:
    """The plan's parts, as a rank can tell them apart."""
    found: dict[str, float] = {}
    for part, size in parts.items():
        is_other = part.startswith("CUDA") or (part.startswith("engine's") and has_process)
        component = OTHERS if is_other else COMPONENTS.get(part, TENSORS)
        found[component] = found.get(component, 0.0) + size
    return found
