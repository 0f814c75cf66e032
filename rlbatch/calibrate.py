"""``python -m rlbatch.plan calibrate=<run folder>,...``: corrects what plans of a cluster take for granted by what its runs measured."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rlbatch.api import ConfigError
from rlbatch.config.bounded_files import read_json
from rlbatch.config.calibration import Calibration, calibration_file, cluster_keys, differing, is_gpu, write_calibration
from rlbatch.config.compose import CONFIG_FILE, load_config
from rlbatch.config.schema import Config
from rlbatch.config.structured import did_you_mean, from_mapping
from rlbatch.plan.accounting import STEP_PHASES, Table, planned_memory
from rlbatch.plan.calibration import Measured, added, combined, factors, uncalibrated
from rlbatch.plan.job_plan import JobPlan
from rlbatch.registry import Registry, load_plugins

MAY_DIFFER = 0.05
"""Share by which a GPU's real memory may differ from ``cluster.gpu_memory_gib``."""
Planned = Callable[[Config, Registry], JobPlan]


def calibrate(folders: Sequence[str], asked: Config | None, into: str, planned: Planned) -> Iterator[str]:
    """Calibrates by runs of one cluster, tells what was planned and measured, and writes the file that later plans take.

    Args:
        folders: The runs' folders.
        asked: The config whose cluster is meant; None: the runs'.
        into: Folder of calibrations.
        planned: Plans a job.

    Raises:
        ConfigError: no run, no GPUs, another cluster.
    """
    runs = [_Run(folder) for folder in folders]
    here = asked or runs[0].config
    for run in runs:
        run.check(here)
    found: list[dict[str, float]] = []
    for run in runs:
        registry, config = load_plugins(run.config.plugins), uncalibrated(run.config, run.measured)
        plan, table = _planned(planned, config, registry)
        yield from _compared(run, plan, table)
        values: dict[str, Any] = factors(plan, table, run.measured)
        corrected = replace(config.plan.assume, **values)
        _, table = _planned(planned, replace(config, plan=replace(config.plan, assume=corrected)), registry)
        found.append(values | added(corrected, table, run.measured))
    values, names = combined(found), tuple(run.folder.name for run in runs)
    path = calibration_file(into, here.cluster)
    write_calibration(path, Calibration(time.strftime("%Y-%m-%d"), names, runs[0].machine.device, cluster_keys(here.cluster), values))
    yield "Corrected (plan.assume)"
    yield from (f"  {name}={value:g}" for name, value in values.items())
    yield f"Written: {path}; plans of this cluster take it and say so"


@dataclass(frozen=True)
class _Machine:
    device: str = ""
    gpu_memory_gib: float = 0.0
    ranks: int = 0
    date: str = ""


@dataclass(frozen=True)
class _Recorded:
    """``plan_vs_actual`` of summary.json; see ``PlanVsActual``."""

    machine: _Machine = field(default_factory=_Machine)
    samples: int = 0
    tokens: Mapping[str, Mapping[str, float | None]] = field(default_factory=dict)
    seconds: Mapping[str, Mapping[str, float | None]] = field(default_factory=dict)
    memory: Mapping[str, Mapping[str, Mapping[str, float | None]]] = field(default_factory=dict)

    def measured(self) -> Measured:
        """The measured numbers among the recorded ones."""
        seconds, tokens = ({name: _positive(row) for name, row in rows.items()} for rows in (self.seconds, self.tokens))
        memory = {phase: {what: gib for what, row in rows.items() if (gib := _positive(row))} for phase, rows in self.memory.items()}
        return Measured(seconds, memory, tokens.get("prompt", 0.0), tokens.get("response", 0.0))


def _positive(row: Mapping[str, float | None]) -> float:
    """A row's ``measured``; 0 if nothing was measured, or no positive finite number."""
    value = row.get("measured") or 0.0
    return value if 0 < value < math.inf else 0.0


class _Run:
    """A run folder, by whose measurements plans are calibrated."""

    def __init__(self, folder: str) -> None:
        self.folder, self.key = Path(folder), f"calibrate={folder}"
        if not (self.folder / CONFIG_FILE).is_file():
            parent = self.folder.parent
            beside = [str(path.parent) for path in sorted(parent.glob(f"*/{CONFIG_FILE}"))]
            close = did_you_mean(str(self.folder), beside) or f"In {parent} there are {', '.join(beside[:5]) or 'none'}."
            raise ConfigError(f"{self.key}: is no run folder, as it has no {CONFIG_FILE}. {close}")
        self.config, summary = load_config(self.folder / CONFIG_FILE), self.folder / "summary.json"
        found = read_json(summary, "Calibrate with another run.").get("plan_vs_actual") or {}
        recorded = from_mapping(_Recorded, found if isinstance(found, Mapping) else {}, f"{summary}: plan_vs_actual.")
        self.machine, self.measured = recorded.machine, recorded.measured()

    def check(self, here: Config) -> None:
        """Refuses a run that says nothing of this cluster, with ConfigError and what differs."""
        if not (any(self.measured.seconds.values()) and self.measured.response):
            raise ConfigError(f"{self.key}: its summary.json has no steps' times beside a plan. Use a run that has done two steps or more.")
        if not self.machine.device:
            raise ConfigError(f"{self.key}: ran on CPUs, and plans are of GPUs. Use a run on GPUs.")
        own = cluster_keys(self.config.cluster)
        if differs := differing(own, cluster_keys(here.cluster)):
            raise ConfigError(f"{self.key}: is of another cluster: {differs}. Use a run of this one, or leave out the keys that differ.")
        if not is_gpu(self.machine.device, here.cluster.gpu):
            raise ConfigError(
                f"{self.key}: was measured on {self.machine.device}, and cluster.gpu={here.cluster.gpu}. "
                "Use a run on that GPU, or correct cluster.gpu."
            )
        has, told = self.machine.gpu_memory_gib, here.cluster.gpu_memory_gib
        if has and told and abs(has - told) > MAY_DIFFER * told:
            raise ConfigError(
                f"{self.key}: its GPUs have {has:.1f} GiB, and cluster.gpu_memory_gib={told:g}. "
                f"Use {has:.1f}, or a run on the GPUs that are meant."
            )


def _planned(planned: Planned, config: Config, registry: Registry) -> tuple[JobPlan, Table]:
    plan = planned(config, registry)
    return plan, planned_memory(plan.memory, plan.nodes, on_gpu=True)


def _compared(run: _Run, plan: JobPlan, table: Table) -> Iterator[str]:
    """A line for each number that was measured."""
    lengths = f"samples of {run.measured.prompt:.0f} and {run.measured.response:.0f} tokens"
    yield f"{run.folder} on {run.machine.device}, {lengths}: planned, measured"
    for phase, name in STEP_PHASES.items():
        if plan.time and (seconds := run.measured.seconds.get(phase)):
            yield _line(f"{name}, s", plan.time.phases[name], seconds)
    for phase, name in STEP_PHASES.items():
        for what, gib in run.measured.memory.get(phase, {}).items():
            if what in table[phase]:
                yield _line(f"{what}, {name}, GiB", table[phase][what]["planned"], gib)


def _line(what: str, planned: float, measured: float) -> str:
    share = f"{measured / planned - 1:+8.0%}" if planned else ""
    return f"  {what:<28}{planned:>10.2f}{measured:>10.2f}{share}"
