"""Calls trackers on rank 0 so that none can end, delay or hang a run: a tracker that fails is reported once and left out."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import Full, Queue

from rlbatch.api import RlbatchError, SampleTracker, StepResult, TableTracker, Tracker, TrackerContext
from rlbatch.foreign_code import error_location, error_text, foreign_code
from rlbatch.tables import ChosenTracker

PATIENCE_S = 120.0
"""Longest accepted call of a tracker, seconds."""
MOST_WAITING = 256
"""Largest number of calls that may wait for a slow tracker."""
CLOSE_S: Mapping[str, float] = {"finished": 30.0}
SHORT_CLOSE_S = 4.0
"""Seconds that all trackers together may take at the end of a run, by its status, and for any other status; both are short."""

Act = Callable[[Tracker], object]


class Trackers:
    """The trackers of a run."""

    def __init__(self, chosen: Sequence[ChosenTracker], context: TrackerContext, tell: Callable[[str], None]) -> None:
        """Opens nothing yet.

        Args:
            chosen: Trackers of the config.
            context: Context that they are opened with; ``begin`` sets its step.
            tell: Shows a line.
        """
        self._chosen, self._context, self._tell = chosen, context, tell
        self._running: list[_Running] = []

    def begin(self, done: int) -> None:
        """Opens the trackers, to continue after step ``done``."""
        context = replace(self._context, done=done)
        self._running = [_Running(tracker, partial(tracker.open, context)) for tracker in self._chosen]
        self._tell_failures()

    def record(self, result: StepResult) -> None:
        """Sends the metrics of a step to all trackers."""
        metrics = dict(result.metrics)
        self._call(lambda tracker: tracker.record(result.step, metrics))

    def samples(self, step: int, path: Path) -> None:
        """Sends the samples of a file to the trackers that take samples."""

        def act(tracker: Tracker) -> None:
            if isinstance(tracker, SampleTracker):
                with path.open(encoding="utf-8") as lines:
                    tracker.samples(step, [json.loads(line) for line in lines])

        self._call(act)

    def table(self, step: int, tag: str, markdown: str) -> None:
        """Sends a table to the trackers that take tables."""
        self._call(lambda tracker: tracker.table(step, tag, markdown) if isinstance(tracker, TableTracker) else None)

    def close(self, status: str) -> None:
        """Closes the trackers; a second call does nothing."""
        deadline = time.monotonic() + CLOSE_S.get(status, SHORT_CLOSE_S)
        ending, self._running = self._running, []
        for running in ending:
            running.end(lambda tracker: tracker.close(status))
        for running in ending:
            running.wait(max(0.0, deadline - time.monotonic()))
        self._show(ending)

    def _call(self, act: Act) -> None:
        for running in self._running:
            running.call(act)
        self._tell_failures()

    def _tell_failures(self) -> None:
        failed = [running for running in self._running if running.failure]
        self._running = [running for running in self._running if not running.failure]
        self._show(failed)

    def _show(self, failed: Sequence[_Running]) -> None:
        for running in failed:
            if running.failure:
                self._tell(f"trackers: {running.name} is left out from here on, the run goes on: {running.failure}")


class _Running:
    """A running tracker, which is opened at once, in a thread of its own unless its spec has it called within the step.

    Attributes:
        name: Name of the tracker.
        failure: Reason why the tracker is left out; empty if it is not.
    """

    def __init__(self, chosen: ChosenTracker, open_it: Callable[[], Tracker]) -> None:
        self.name, self.failure = chosen.name, ""
        self._open = open_it
        self._tracker: Tracker | None = None
        self._waiting: Queue[Act | None] | None = None
        self._since = 0.0  # when the call began that the thread is in; 0: in none
        if chosen.spec.in_step:
            self.call(lambda tracker: None)
            return
        self._waiting = Queue(MOST_WAITING)
        self._thread = threading.Thread(target=self._work, args=(self._waiting,), name=f"tracker {self.name}", daemon=True)
        self._thread.start()

    def call(self, act: Act) -> None:
        """Calls the tracker, or queues the call for its thread."""
        if self._waiting is None:
            self._call_here(act)
            return
        since = self._since
        if since and time.monotonic() - since > PATIENCE_S:
            self.failure = self.failure or f"a call did not come back within {PATIENCE_S:.0f} s"
        try:
            self._waiting.put_nowait(act)
        except Full:
            self.failure = self.failure or f"it is {MOST_WAITING} calls behind"

    def end(self, act: Act) -> None:
        """Makes the last call."""
        if not self.failure:
            self.call(act)
        if self._waiting is not None:
            try:
                self._waiting.put_nowait(None)
            except Full:
                self.failure = self.failure or f"it is {MOST_WAITING} calls behind"

    def wait(self, seconds: float) -> None:
        """Waits until the last call is done."""
        if self._waiting is None or self.failure:
            return
        self._thread.join(seconds)
        if self._thread.is_alive():
            self.failure = self.failure or "it did not end in time; what it has not written yet is lost"

    def _call_here(self, act: Act) -> None:
        if self.failure:
            return
        try:
            with foreign_code(f"trackers={self.name}"):
                self._do(act)
        except RlbatchError as error:
            self.failure = str(error)

    def _work(self, waiting: Queue[Act | None]) -> None:
        try:
            self._since = time.monotonic()
            self._do(lambda tracker: None)
            self._since = 0.0
            while not self.failure and (act := waiting.get()) is not None:
                self._since = time.monotonic()
                self._do(act)
                self._since = 0.0
        except BaseException as error:  # foreign code may raise anything, sys.exit too
            self.failure = str(error) if isinstance(error, RlbatchError) else f"{error_text(error)}{error_location(error)}"

    def _do(self, act: Act) -> None:
        if self._tracker is None:
            self._tracker = self._open()
        act(self._tracker)
