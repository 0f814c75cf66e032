"""Compares the memory that a job takes with its plan: by phase of a step, and by component for a rank that ran out of memory."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from rlbatch.plan.advice import cheapest_relief
from rlbatch.plan.engine_memory import GIB
from rlbatch.plan.estimate import MemoryEstimate
from rlbatch.plan.job_plan import JobPlan
from rlbatch.plan.memory import LEFT, PHASES, PROCESS_GIB, STATE, WHEN, Parts
from rlbatch.registry import Registry

STEP_PHASES = {"sync": "sync", "rollout": "generate", "logprobs": "log-probs", "update": "update"}
"""Phase of a step, as metric tags name it -> phase of the plan (``PHASES``)."""
ENDS_AS = {"sync": "generate"}
"""Phase of the plan -> phase whose memory GPUs have at its end: a sync ends by waking the engines and then their caches."""
OTHER_PHASES = {"restart": "sync", "reward": "generate"}
"""Phase of a step without a memory tag -> phase of the plan. For all phases in neither table it is ``log-probs``, where engines sleep."""
TENSORS = "activations and other tensors"
OTHERS = "engine, CUDA and NCCL"
COMPONENTS = {"weights": "weights", "gradients": "gradients", "fragmentation": "fragmentation", **dict.fromkeys(STATE, "optimizer state")}
"""Part of a plan for a GPU -> component under which messages show it, for the parts that have a component of their own."""
SHOWN_GIB = 0.05
"""Smallest size that messages show, GiB."""
LEFT_GPU = "what left the GPU"
PROCESSES = "processes and all else"
IMPORT = "import"
"""Name of the phase before a rank knows its plan, in which it imports."""
ON_HOST = {
    "weights": "weights",
    "gradients": "gradients",
    "reference model": "reference model",
    "optimizer": "optimizer state",
    **dict.fromkeys(STATE, "optimizer state"),
    **dict.fromkeys((LEFT, "weights that left the GPU"), LEFT_GPU),
}
"""Part of a plan for host memory -> component under which messages show it."""
MADE_IN = {"load": tuple(dict.fromkeys(ON_HOST.values())), "update": ("optimizer state", LEFT_GPU)}
"""Phase of the plan -> components of host memory that are made in it, whose size a rank has not told before."""
_ASKED = re.compile(r"Tried to allocate ([\d.]+) ([MG]iB)")

Table = dict[str, dict[str, dict[str, float]]]


def planned_memory(memory: MemoryEstimate, nodes: Sequence[int], *, on_gpu: bool) -> Table:
    """The memory that a plan expects in each phase of a step, and the part of it that is certainly held, GiB.

    Returns phase -> ``gpu`` (all of rank 0's GPU), ``trainer`` (the trainer on that GPU) or ``node`` (the node that takes most) ->
    ``planned`` or ``at_least``. ``nodes`` are the numbers of ranks of each node.
    """
    table: Table = {}
    for name, phase in STEP_PHASES.items():
        rows = {}
        for what, floor in (("planned", memory.expected), ("at_least", memory.floor)):
            gpu = floor.stages[0].gpu
            own = {part: size for part, size in gpu[phase].items() if part != "fragmentation" and not part.startswith(("engine's", "CUDA"))}
            most = max(sum(gpu[each].values()) for each in (phase, ENDS_AS.get(phase, phase)))
            found = {"gpu": most / GIB, "trainer": sum(own.values()) / GIB} if on_gpu else {}
            rows[what] = {**found, "node": floor.fullest_host(nodes, [phase]).gib}
        table[name] = {kind: {what: row[kind] for what, row in rows.items()} for kind in rows["planned"]}
    return table


def out_of_memory(
    plan: JobPlan, registry: Registry, rank: int, name: str, taken: Parts, said: str, owners: Sequence[tuple[str, int]] = ()
) -> str:
    """The error message for a rank whose GPU has no memory left.

    Args:
        plan: Plan of the job.
        registry: Plugins of the job.
        rank: The rank that ran out of memory.
        name: Phase of the step in which it did.
        taken: Component -> bytes that are allocated.
        said: Text of torch's error.
        owners: Lines of code that hold most of the memory, each with its bytes.

    Returns:
        Text with the component that outgrew its plan most, all components, the lines of code that hold most, and the cheapest change
        with which the phase takes as many bytes less as torch asked for.
    """
    phase = STEP_PHASES.get(name, OTHER_PHASES.get(name, "log-probs"))
    stages = plan.memory.expected.stages
    stage = rank * len(stages) // plan.job.config.layout.world_size
    planned = _components(stages[stage].gpu[phase], has_process=plan.job.has_process)
    said_first, each_one = _compared(taken, planned)
    asked = _ASKED.search(said)
    lacks = float(asked[1]) / (1024 if asked[2] == "MiB" else 1) if asked else 0.0
    change = cheapest_relief(plan, registry, phase, lacks)
    fix = f"Use {change}" if change else "Use sizes that divide the model further, or more GPUs (layout.world_size)"
    held = f"Of torch's, GiB: {', '.join(f'{line} {size / GIB:.1f}' for line, size in owners)}. " if owners else ""
    more = f", and asked for {lacks:.2f} GiB more" if asked else ""
    return (
        f"layout.world_size={plan.job.config.layout.world_size}: rank {rank}'s GPU has no memory left {WHEN[phase]}: {said_first}{more}. "
        f"GiB taken (planned): {each_one}. "
        f"{held}{fix}."
    )


def host_plans(plan: JobPlan, registry: Registry, rank: int) -> dict[str, dict[str, Any]]:
    """The part of a job's plan that ``out_of_host_memory`` needs, by phase of the plan.

    Each phase has ``planned``, component -> bytes of host memory that the rank is expected to take, and ``change``, the cheapest change
    with which the rank's node takes less.
    """
    config, stages = plan.job.config, plan.memory.floor.stages  # beside it only what is no rank's is expected of a host
    stage = stages[rank * len(stages) // config.layout.world_size]
    tokens = max(config.train.pack_tokens // 2, -(-plan.work.longest // config.layout.cp_size))
    found: dict[str, dict[str, Any]] = {}
    for phase in PHASES:
        planned: dict[str, float] = {}
        for part, size in stage.host[phase].items():
            component = ON_HOST.get(part, PROCESSES)
            planned[component] = planned.get(component, 0.0) + size
        change = str(cheapest_relief(plan, registry, phase, 0.0, on_host=True) or "")
        if phase in ("log-probs", "update") and not (change or plan.job.on_gpu) and tokens < config.train.pack_tokens:
            change = f"train.max_tokens_per_gpu={tokens}"  # activations are not planned on a host
        found[phase] = {"planned": planned, "change": change}
    return found


def out_of_host_memory(told: Mapping[str, Any], most: int, others: int, *, on_gpu: bool, limit: str = "--mem") -> str:
    """The error message for a rank whose host has no memory left; empty if a plugin of its job cannot be planned with.

    Args:
        told: What the rank has reported: ``host_plans``, the watchdog's ``phase``, what the rank is ``doing`` (a phase of the step or
            of the plan) and ``held``, component -> bytes. A rank without a plan yet is importing. Memory that nobody has named is first
            taken for that of components that are made in the phase, up to their plan.
        most: Peak memory of the rank's process, bytes.
        others: Memory of the processes that it started, bytes.
        on_gpu: Whether the rank has a GPU.
        limit: Option with which more memory can be requested.
    """
    alone = {"planned": {PROCESSES: PROCESS_GIB["gpu" if on_gpu else "cpu"] * GIB}, "change": "more nodes or fewer ranks on each"}
    plans, held = told.get("host_plans", {IMPORT: alone}), told.get("held", {})
    name = "save" if told.get("phase") == "checkpoint" else str(told.get("doing", IMPORT))
    phase = name if name in (IMPORT, *PHASES) else STEP_PHASES.get(name, OTHER_PHASES.get(name, "log-probs"))
    if phase not in plans:
        return ""
    planned, change = plans[phase]["planned"], plans[phase]["change"]
    taken = {**held, PROCESSES: max(most + others - sum(held.values()), 0)}
    for part in MADE_IN.get(phase, ()):
        made = min(planned.get(part, 0.0) - taken.get(part, 0.0), taken[PROCESSES] - planned.get(PROCESSES, 0.0))
        if made > 0:
            taken[part], taken[PROCESSES] = taken.get(part, 0.0) + made, taken[PROCESSES] - made
    said_first, each_one = _compared(taken, planned)
    fix = f"Use {change}" if change else "Use sizes that divide the model further, more nodes or fewer ranks on each"
    when = WHEN.get(phase, "while it imports")
    return f"{when}: {said_first}. GiB of the rank and what it started (planned): {each_one}. {fix}, or ask for more ({limit})."


def _compared(taken: Parts, planned: Parts) -> tuple[str, str]:
    """Text about the component that outgrew its plan most, and a list of all components, the largest first."""
    both = {each: (taken.get(each, 0.0) / GIB, planned.get(each, 0.0) / GIB) for each in {*taken, *planned}}
    worst = max(both, key=lambda each: both[each][0] - both[each][1])
    over = both[worst][0] - both[worst][1]
    fits = f"nothing outgrew what was planned, {sum(planned.values()) / GIB:.1f} GiB in all"
    outgrew = f"{worst} took {over:+.1f} GiB beside what was planned" if over >= SHOWN_GIB else fits
    shown = sorted((each for each in both if max(both[each]) >= SHOWN_GIB), key=lambda each: -max(both[each]))
    return outgrew, ", ".join("{} {:.1f} ({:.1f})".format(each, *both[each]) for each in shown)


def _components(parts: Parts, *, has_process: bool) -> Mapping[str, float]:
    """The bytes of a plan's parts, summed into the components that a rank can tell apart."""
    found: dict[str, float] = {}
    for part, size in parts.items():
        is_other = part.startswith("CUDA") or (part.startswith("engine's") and has_process)
        component = OTHERS if is_other else COMPONENTS.get(part, TENSORS)
        found[component] = found.get(component, 0.0) + size
    return found
