"""Writes the files that a run leaves for people and scripts: ``summary.json`` and ``samples/step_000010.jsonl``."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, Literal

from rlbatch.api import SampleGroup, StepResult
from rlbatch.config.bounded_files import read_own
from rlbatch.metrics.evaluations import FOLDER as EVALUATIONS
from rlbatch.metrics.evaluations import Evaluation
from rlbatch.metrics.names import DROPPED_BY
from rlbatch.metrics.plan_vs_actual import PlanVsActual

COUNTED = tuple(f"sampling/{name}" for name in ("sampled", "accepted", "all_right", "all_wrong", "rounds", "stale", "skipped_steps"))
SAMPLES = "samples"
"""Name of the folder with the samples of training steps."""
_PLACE = re.compile(rb'{"step": \d+, "prompt_id": (\d+), "sample_index": (\d+), ')
Status = Literal["running", "finished", "failed", "interrupted"]


@dataclass
class Summary:
    """Content of summary.json, with null for values that were not measured (yet) or were not finite.

    Attributes:
        status: ``running`` until the end. A run that is killed with its machine keeps it until the next start in its folder.
        steps: Last finished step.
        seconds: Seconds since this attempt started on rank 0, loading included; all sums are of this attempt too.
        reward_start: Training reward (``reward/mean``) of the first step.
        reward_end: Training reward of the last step.
        eval_reward_start: First held-out reward.
        eval_reward: Last held-out reward.
        evaluations: Name of a set -> its last table: step, prompts, n, and for each metric value and standard_error.
        tokens_per_s: Tokens of all steps, divided by the time of the steps.
        sync_median_s: Median of ``time/sync_s`` over the steps.
        rollout_logprob_diff: ``train/rollout_logprob_diff_mean`` of the last step.
        skipped_updates: Sum of ``train/skipped_updates`` over the steps.
        steps_without_signal: Number of steps whose advantages were all 0.
        sampling: Name of a ``sampling/`` tag that counts -> sum over the steps; only with ``sampling.*``.
        phase_seconds: Name of a ``time/`` tag -> sum over the steps.
        plan_vs_actual: Planned and measured values of a step; see ``PlanVsActual``.
        first_error: Failure that ended the run, which is the one reported first; null if there was none.
    """

    status: Status = "running"
    steps: int = 0
    seconds: float = 0.0
    reward_start: float | None = None
    reward_end: float | None = None
    eval_reward_start: float | None = None
    eval_reward: float | None = None
    evaluations: dict[str, Any] = field(default_factory=dict)
    tokens_per_s: float | None = None
    sync_median_s: float | None = None
    rollout_logprob_diff: float | None = None
    skipped_updates: int = 0
    steps_without_signal: int = 0
    sampling: dict[str, int] = field(default_factory=dict)
    phase_seconds: dict[str, float] = field(default_factory=dict)
    plan_vs_actual: dict[str, Any] = field(default_factory=dict)
    first_error: Mapping[str, Any] | None = None


class RunReport:
    """Keeps summary.json up to date: written at the start, after every step and at the end, always as a whole file."""

    def __init__(self, run_dir: Path) -> None:
        """Writes the first summary and starts the run's clock. Steps and rewards of an earlier attempt stay until ``begin``."""
        self._path = run_dir / "summary.json"
        self.summary = Summary(**_earlier_life(self._path))
        self._started = time.monotonic()
        self._tokens = 0.0
        self._step_s = 0.0
        self._sync_s: list[float] = []
        self._beside_plan = PlanVsActual({})
        self._write()

    def begin(self, done: int) -> None:
        """Continues after step ``done``; with 0, forgets an earlier attempt."""
        self.summary = replace(self.summary, steps=done) if done else Summary()
        self._write()

    def plan(self, table: Mapping[str, Any]) -> None:
        """Keeps the planned values of a step, which steps are compared with; see ``PlanVsActual``."""
        self._beside_plan = PlanVsActual(table)
        self.summary.plan_vs_actual = self._beside_plan.table

    def record(self, result: StepResult) -> dict[str, float]:
        """Adds a step (or, as step 0, the evaluation before the first one), and returns the tags that compare it with the plan."""
        summary, metrics = self.summary, result.metrics
        summary.steps = result.step
        if "reward/mean" in metrics:
            summary.reward_end = metrics["reward/mean"]
            summary.reward_start = summary.reward_end if summary.reward_start is None else summary.reward_start
        if "reward/eval" in metrics:
            summary.eval_reward = metrics["reward/eval"]
            summary.eval_reward_start = summary.eval_reward if summary.eval_reward_start is None else summary.eval_reward_start
        if "perf/tokens_per_s" in metrics and "time/step_s" in metrics:
            self._tokens += metrics["perf/tokens_per_s"] * metrics["time/step_s"]
            self._step_s += metrics["time/step_s"]
            summary.tokens_per_s = self._tokens / self._step_s if self._step_s else None
        if "time/sync_s" in metrics:
            self._sync_s.append(metrics["time/sync_s"])
            summary.sync_median_s = median(self._sync_s)
        summary.rollout_logprob_diff = metrics.get("train/rollout_logprob_diff_mean", summary.rollout_logprob_diff)
        summary.skipped_updates += int(metrics.get("train/skipped_updates", 0))
        summary.steps_without_signal += metrics.get("advantage/abs_mean") == 0
        for tag, value in metrics.items():
            if tag.startswith("sampling/") and (tag in COUNTED or DROPPED_BY in tag):
                name = tag.removeprefix("sampling/")
                summary.sampling[name] = summary.sampling.get(name, 0) + int(value)
        compared = self._beside_plan.record(metrics)
        self.measure(metrics)
        return compared

    def evaluated(self, step: int, sets: Sequence[Evaluation]) -> None:
        """Keeps the tables of an evaluation, which the next ``record`` writes."""
        self.summary.evaluations = {**self.summary.evaluations, **{each.name: each.summary(step) for each in sets}}

    def measure(self, metrics: Mapping[str, float]) -> None:
        """Adds times of a step, which may be recorded already."""
        for tag, value in metrics.items():
            if tag.startswith("time/"):
                phase = tag.removeprefix("time/").removesuffix("_s")
                self.summary.phase_seconds[phase] = self.summary.phase_seconds.get(phase, 0.0) + value
        self._write()

    def finish(self, status: Status, first_error: Mapping[str, Any] | None = None) -> None:
        """Writes the last summary, on success and on failure."""
        if status != "failed" or first_error:  # else the one that is known stays
            self.summary.first_error = first_error
        self.summary.status = status
        self._write()

    def _write(self) -> None:
        self.summary.seconds = time.monotonic() - self._started
        scratch = self._path.with_suffix(".json.part")
        scratch.write_text(json.dumps(_finite(asdict(self.summary)), indent=2) + "\n", encoding="utf-8")
        os.replace(scratch, self._path)


def record_end(run_dir: Path, status: Status, first_error: Mapping[str, Any] | None = None) -> bool:
    """Writes the end of a run into summary.json for a dead rank 0; returns whether the file still said ``running``."""
    path = run_dir / "summary.json"
    scratch = path.with_suffix(f".json.part{os.getpid()}")
    with suppress(OSError, ValueError, KeyError, TypeError):
        summary = read_own(path)
        if summary["status"] == "running":
            scratch.write_text(json.dumps(summary | {"status": status, "first_error": first_error}, indent=2) + "\n", encoding="utf-8")
            os.replace(scratch, path)
            return True
    return False


def sample_rows(step: int, groups: Sequence[SampleGroup], advantages: Sequence[float]) -> Iterator[dict[str, Any]]:
    """Yields the step's samples as rows of ``samples/``, in plain values that can be gathered over ranks.

    Args:
        step: Number of the step, from 1.
        groups: Scored groups.
        advantages: [N] advantage of each sample, in the order of the groups' samples.

    Yields:
        N rows, sorted by prompt and sample. Each is made on demand, as texts are most of a step's data.
    """
    places = ((group, place) for group in groups for place in range(len(group.samples)))
    scored = sorted(zip(places, advantages, strict=True), key=lambda each: _position(*each[0]))
    for (group, place), advantage in scored:
        sample = group.samples[place]
        yield {
            "step": step,
            "prompt_id": group.prompt.prompt_id,
            "sample_index": sample.sample_index,
            "prompt": group.prompt.text,
            "response": sample.response,
            "label": group.prompt.label,
            "reward": group.rewards[place],
            **{f"reward/{part}": value for part, value in (group.parts[place] if group.parts else {}).items()},
            **({"failure": group.failures[place]} if group.failures and group.failures[place] else {}),
            "advantage": float(advantage),
            "finish_reason": sample.finish_reason,
            "policy_version": sample.policy_version,
        }


def _position(group: SampleGroup, place: int) -> tuple[int, int]:
    return group.prompt.prompt_id, group.samples[place].sample_index


def line_of(row: Mapping[str, Any]) -> bytes:
    """A row as a line of JSON, without the line's end."""
    return json.dumps(_finite(row), ensure_ascii=False).encode("utf-8", "backslashreplace")  # half a character becomes its JSON escape


def place_of(line: bytes) -> tuple[int, ...]:
    """Prompt and sample index of a line that was made from ``sample_rows``."""
    found = _PLACE.match(line)
    assert found
    return tuple(map(int, found.groups()))


def write_samples(run_dir: Path, step: int, lines: Iterable[bytes], folder: str = SAMPLES) -> Path:
    """Writes the lines of one step (``line_of``) to ``<folder>/step_<step>.jsonl``, and returns its path."""
    path = run_dir / folder / f"step_{step:06d}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.writelines(line + b"\n" for line in lines)
    return path


def has_steps(run_dir: Path) -> bool:
    """Whether any step of a run was done in this folder."""
    return bool(_earlier_life(run_dir / "summary.json").get("steps")) or any((run_dir / "samples").glob("step_*.jsonl"))


def remove_samples_after(run_dir: Path, step: int) -> None:
    """Removes the samples of steps after ``step``, which run again. With 0, for a new run, renames the folders of all samples instead."""
    for folder in (run_dir / SAMPLES, run_dir / EVALUATIONS):
        if not step and any(folder.rglob("step_*.jsonl")):
            os.replace(folder, next(path for number in itertools.count(1) if not (path := run_dir / f"{folder.name}.{number}").exists()))
        for path in folder.rglob("step_*.jsonl"):
            number = path.stem.removeprefix("step_")
            if number.isdecimal() and int(number) > step:
                path.unlink()


def _earlier_life(path: Path) -> dict[str, Any]:
    """The values of the last summary that a resumed run keeps; none if the file is damaged."""
    try:
        content = read_own(path)
    except (OSError, ValueError):
        return {}
    names = ("steps", "reward_start", "reward_end", "eval_reward_start", "eval_reward", "evaluations")
    return {name: content[name] for name in names if name in content}


def _finite(value: Any) -> Any:
    """The value with None in place of NaN and infinity, which JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value
