"""What a run leaves in its folder for people and scripts: ``summary.json`` and ``samples/step_000010.jsonl``."""

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
"""Folder of the training steps' samples."""
_PLACE = re.compile(rb'{"step": \d+, "prompt_id": (\d+), "sample_index": (\d+), ')
Status = Literal["running", "finished", "failed", "interrupted"]


@dataclass
class Summary:
    """The content of summary.json; null where nothing was measured (yet), or where a value was not finite.

    Attributes:
        status: ``running`` until the end; a run that was killed as a whole, its machine too, stays so until the next start in its folder.
        steps: Last finished step.
        seconds: Since the run started on rank 0, loading included; of this attempt of the run, as all sums are.
        reward_start: Training reward (``reward/mean``) of the first step.
        reward_end: Training reward of the last step.
        eval_reward_start: First held-out reward.
        eval_reward: Last held-out reward.
        evaluations: By set of held-out prompts, its last table: step, prompts, n, and of each metric value and standard_error.
        tokens_per_s: All tokens of all steps over the time of the steps.
        sync_median_s: Median of ``time/sync_s`` over the steps.
        rollout_logprob_diff: ``train/rollout_logprob_diff_mean`` of the last step.
        skipped_updates: Sum of ``train/skipped_updates`` over the steps.
        steps_without_signal: Steps whose advantages were all 0.
        sampling: With ``sampling.*``: sums over the steps of those ``sampling/`` tags that count, by their names.
        phase_seconds: Sum of each ``time/`` tag over the steps.
        plan_vs_actual: What was planned of a step and what steps measured; see ``PlanVsActual``.
        first_error: What ended the run: the failure that was reported first; null if none.
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
    """Keeps summary.json up to date: written at the start, after every step and at the end, always as a whole."""

    def __init__(self, run_dir: Path) -> None:
        """Writes the first summary; the run's clock starts here. Steps and rewards of an earlier attempt stay until ``begin``."""
        self._path = run_dir / "summary.json"
        self.summary = Summary(**_earlier_life(self._path))
        self._started = time.monotonic()
        self._tokens = 0.0
        self._step_s = 0.0
        self._sync_s: list[float] = []
        self._beside_plan = PlanVsActual({})
        self._write()

    def begin(self, done: int) -> None:
        """Goes on after step ``done``; from the start (0), an earlier attempt is forgotten."""
        self.summary = replace(self.summary, steps=done) if done else Summary()
        self._write()

    def plan(self, table: Mapping[str, Any]) -> None:
        """Keeps what was planned of a step, beside which steps put what they measure; see ``PlanVsActual``."""
        self._beside_plan = PlanVsActual(table)
        self.summary.plan_vs_actual = self._beside_plan.table

    def record(self, result: StepResult) -> dict[str, float]:
        """Adds a step (or, as step 0, the evaluation before the first one); returns the tags that compare it with its plan."""
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
        """Keeps the tables of an evaluation; the next ``record`` writes them."""
        self.summary.evaluations = {**self.summary.evaluations, **{each.name: each.summary(step) for each in sets}}

    def measure(self, metrics: Mapping[str, float]) -> None:
        """Adds times of a step that may be recorded already."""
        for tag, value in metrics.items():
            if tag.startswith("time/"):
                phase = tag.removeprefix("time/").removesuffix("_s")
                self.summary.phase_seconds[phase] = self.summary.phase_seconds.get(phase, 0.0) + value
        self._write()

    def finish(self, status: Status, first_error: Mapping[str, Any] | None = None) -> None:
        """Writes the last summary; call it on success and on failure."""
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
    """Writes how a run ended into summary.json, for a rank 0 that is gone and did not; returns whether that was so."""
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
    """The step's samples as rows of ``samples/``: plain values, to be gathered over ranks.

    Args:
        step: From 1.
        groups: Scored groups.
        advantages: [N] one a sample, in the order of the groups' samples.

    Yields:
        [N] rows by prompt and sample, each made when it is asked for: their texts are most of what a step has.
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
    """A row as it is written, without the line's end."""
    return json.dumps(_finite(row), ensure_ascii=False).encode("utf-8", "backslashreplace")  # half a character becomes its JSON escape


def place_of(line: bytes) -> tuple[int, ...]:
    """Prompt and sample of a line, of what ``sample_rows`` made."""
    found = _PLACE.match(line)
    assert found
    return tuple(map(int, found.groups()))


def write_samples(run_dir: Path, step: int, lines: Iterable[bytes], folder: str = SAMPLES) -> Path:
    """Writes the rows of one step (``line_of``) to ``<folder>/step_<step>.jsonl`` and returns its path."""
    path = run_dir / folder / f"step_{step:06d}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.writelines(line + b"\n" for line in lines)
    return path


def has_steps(run_dir: Path) -> bool:
    """Whether a step of a run was done in its folder."""
    return bool(_earlier_life(run_dir / "summary.json").get("steps")) or any((run_dir / "samples").glob("step_*.jsonl"))


def remove_samples_after(run_dir: Path, step: int) -> None:
    """Removes the samples of later steps, which are done again. Of a run that begins anew (0) all of them are put aside instead."""
    for folder in (run_dir / SAMPLES, run_dir / EVALUATIONS):
        if not step and any(folder.rglob("step_*.jsonl")):
            os.replace(folder, next(path for number in itertools.count(1) if not (path := run_dir / f"{folder.name}.{number}").exists()))
        for path in folder.rglob("step_*.jsonl"):
            number = path.stem.removeprefix("step_")
            if number.isdecimal() and int(number) > step:
                path.unlink()


def _earlier_life(path: Path) -> dict[str, Any]:
    """What a resumed run keeps of its last summary; nothing if that is damaged."""
    try:
        content = read_own(path)
    except (OSError, ValueError):
        return {}
    names = ("steps", "reward_start", "reward_end", "eval_reward_start", "eval_reward", "evaluations")
    return {name: content[name] for name in names if name in content}


def _finite(value: Any) -> Any:
    """The value with null for NaN and infinity, which JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value
