"""Shows and writes everything about a run, through one object that is silent on every rank but 0."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

from rlbatch.api import ConfigError, StepResult, TrackerContext
from rlbatch.metrics.evaluations import FOLDER, Evaluation
from rlbatch.metrics.progress import RunProgress, format_seconds
from rlbatch.metrics.report import RunReport, Status, Summary, line_of, remove_samples_after, write_samples
from rlbatch.metrics.tracking import Trackers
from rlbatch.tables import ChosenTracker


def finished_line(summary: Summary, run_dir: Path) -> str:
    """The last line of a run that finished all its steps."""
    rewards = (("reward", summary.reward_end), ("eval", summary.eval_reward))
    told = ", ".join(f"{name} {value:.2f}" for name, value in rewards if value is not None)
    return f"finished in {format_seconds(summary.seconds)}{f': {told}' if told else ''}; {run_dir}"


class RunLog:
    """Progress, summary.json, samples and trackers of one run. Every rank calls it alike; only rank 0 does anything.

    What cannot be written, on a full disk for instance, is a ``ConfigError``; what a tracker cannot write is none.
    """

    def __init__(self, run_dir: Path, steps: int, rank: int, stream: TextIO | None = None) -> None:
        """Opens the log.

        Args:
            run_dir: The run folder, which exists.
            steps: Number of steps of the run; 0 if it has none.
            rank: Rank of this process.
            stream: Stream that progress is shown on; stdout if None.
        """
        self._run_dir = run_dir
        self._report = RunReport(run_dir) if rank == 0 else None
        self._progress = RunProgress(steps, stream) if rank == 0 else None
        self._trackers: Trackers | None = None

    def track(self, chosen: Sequence[ChosenTracker], context: TrackerContext) -> None:
        """Sets the trackers of the run, which ``begin`` opens."""
        if self._progress:
            self._trackers = Trackers(chosen, context, self._progress.phase)

    def phase(self, text: str) -> None:
        """Shows a message about work outside of steps, e.g. ``loading the model``."""
        if self._progress:
            self._progress.phase(text)

    def begin(self, done: int) -> None:
        """Continues after step ``done`` (0: from the start); removes output of later steps of an earlier attempt, which will run again."""
        if self._report:
            with self._writing("what a run tells of itself"):
                self._report.begin(done)
                remove_samples_after(self._run_dir, done)
        if self._trackers:
            self._trackers.begin(done)

    def plan(self, table: Mapping[str, Any]) -> None:
        """Sets the planned values of a step, which steps are compared with; see ``PlanVsActual``."""
        if self._report:
            self._report.plan(table)

    def record(self, result: StepResult) -> None:
        """Records a step; step 0 is the evaluation before the first one."""
        with self._writing("metrics"):
            if self._report:
                result = replace(result, metrics={**result.metrics, **self._report.record(result)})
            for sink in (self._trackers, self._progress):
                if sink:
                    sink.record(result)

    def measure(self, step: int, metrics: Mapping[str, float]) -> None:
        """Adds metrics of a recorded step that become known only later."""
        if self._report:
            with self._writing("metrics"):
                self._report.measure(metrics)
        if self._trackers:
            self._trackers.record(StepResult(step, 0, metrics))

    def samples(self, step: int, lines: Iterable[bytes]) -> None:
        """Writes the samples of a step, given as lines of ``report.line_of`` in order, which only rank 0 reads."""
        if self._report:
            with self._writing("samples"):
                path = write_samples(self._run_dir, step, lines)
                if self._trackers:
                    self._trackers.samples(step, path)

    def evaluated(self, step: int, sets: Sequence[Evaluation]) -> None:
        """Writes tables and samples of an evaluation, before its step is recorded."""
        if self._report:
            with self._writing("evaluations"):
                self._report.evaluated(step, sets)
                for each in sets:
                    write_samples(self._run_dir, step, map(line_of, each.rows), f"{FOLDER}/{each.name}")
        if self._trackers:
            for each in sets:
                self._trackers.table(step, f"eval/{each.name}", each.markdown())

    def failed(self, first_error: Mapping[str, Any]) -> None:
        """Writes the failure into summary.json, from any thread, whatever the main thread does."""
        if self._report:
            with suppress(OSError):  # a full disk, which is the failure, or told beside it
                self._report.finish("failed", first_error)

    @contextmanager
    def _writing(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ConfigError(
                f"run_dir={self._run_dir}: {what} cannot be written ({error.strerror or error}). Free space, then go on with resume=auto."
            ) from error

    def finish(self, status: Status, first_error: Mapping[str, Any] | None = None) -> None:
        """Ends the log, on success and on failure.

        Args:
            status: How the run ended.
            first_error: The failure that was reported first, e.g. ``{"rank": 17, "host": "n03", "message": ...}``.
        """
        with suppress(OSError):  # a full disk, which is told already, or has no say in how a run ended
            if self._progress:
                self._progress.close()
        if self._report:
            with suppress(OSError):
                self._report.finish(status, first_error)
        if self._trackers:  # last: they take their time
            with suppress(OSError):
                self._trackers.close(status)
        if self._report and self._progress and status == "finished":
            with suppress(OSError):  # nobody may read it any more
                self._progress.phase(finished_line(self._report.summary, self._run_dir))
