"""Decides when a job that was asked to stop does so: at the next step boundary if there is time for it, else before the step's update.

All ranks decide alike, from what every rank reported where all of them met: a signal may have reached only some.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Literal

from rlbatch.config.machines import LaunchConfig
from rlbatch.launch.membership.store import JobStore
from rlbatch.launch.membership.watchdog import Phase, Watchdog
from rlbatch.launch.shutdown.signals import Ending, Interrupted, StopNotice, find_ending

POLL_S = 1.0
"""Seconds between reads of the other ranks' reports."""
RECENT_STEPS = 5
"""Number of recent steps whose longest one predicts the next."""
Place = Literal["generation", "ended", "restart", "step"]
PHASES: Mapping[Place, Phase] = {"generation": "generation", "ended": "training", "restart": "start", "step": "training"}
"""Place where ranks meet -> phase in which the other ranks may still be."""
NOTICED, ENDING = "stop/noticed", "stop/ending"
"""Keys of the job's store: a rank's signal, and the ending that rank 0 derived from it."""


class Pace:
    """Durations of this job's steps and saves. ``save_s`` is an estimate until a save was measured."""

    def __init__(self, save_s: float) -> None:
        self.save_s = save_s
        self._steps: deque[tuple[float, float]] = deque(maxlen=RECENT_STEPS)

    def measure(self, before_s: float, after_s: float) -> None:
        """Records a step's seconds until all ranks had generated, and after that."""
        self._steps.append((before_s, after_s))

    def rest_s(self, elapsed_s: float) -> float:
        """Longest time from within a step's generation to the end of a save after that step, seconds; infinite in the first step.

        Args:
            elapsed_s: Seconds since the step began; infinite if all ranks have generated.
        """
        if not self._steps:
            return float("inf")
        before, after = max(step[0] for step in self._steps), max(step[1] for step in self._steps)
        return max(before - elapsed_s, 0.0) + after + self.save_s


@dataclass(frozen=True)
class _Word:
    """The report of a rank where all ranks meet.

    Attributes:
        signal: Number of the signal that the rank got; 0 if none.
        received: Time of the signal, seconds since the epoch.
        deadline: End of the job as far as the rank knows, seconds since the epoch; 0 if it knows of none.
        now: Time on its clock, seconds since the epoch.
        is_complete: Whether the rank has finished the work before this meeting.
        rest_s: Seconds that it needs to finish the step and save.
        engine: Number of the engine that it knows to be lost; -1 if none.
        lost_by: Reason for that loss.
    """

    signal: int
    received: float
    deadline: float
    now: float
    is_complete: bool = True
    rest_s: float = 0.0
    engine: int = -1
    lost_by: str = ""


@dataclass(frozen=True)
class Agreement:
    """The conclusions that all ranks share after a meeting.

    Attributes:
        must_leave: Whether the job ends here, in the middle of a step, before anything was changed.
        lost: Number of each lost engine -> reason.
    """

    must_leave: bool
    lost: Mapping[int, str]


class Stopping:
    """Ends a job early on request, on one rank.

    ``save_s`` is an estimate of the seconds of a save. ``ending`` has reason and time of the end, once this rank knows them.
    """

    def __init__(self, store: JobStore, watchdog: Watchdog, notice: StopNotice, limits: LaunchConfig, save_s: float = 0.0) -> None:
        self._store, self._watchdog, self._notice, self._limits = store, watchdog, notice, limits
        self.pace = Pace(save_s)
        self.ending: Ending | None = None
        self._began = self._met = 0.0
        self._may_finish_step = True
        self._is_generating = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Context in which signals end nothing at once: a thread learns of other ranks' signals, and interrupts generation if it must."""
        self._notice.started()
        over = threading.Event()
        thread = threading.Thread(target=self._listen, args=(self._store.clone(), over), name="rlbatch-stopping", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            self._notice.post(0)
            thread.join()

    @contextmanager
    def generating(self, *, may_finish: bool) -> Iterator[None]:
        """Context of a generation and the work around it, which a stop may interrupt.

        After a notice, generation goes on if ``may_finish`` and there is time for the whole step; else it ends at once.
        """
        self._began, self._may_finish_step, self._is_generating = time.monotonic(), may_finish, True
        try:
            yield
        finally:
            self._is_generating = False

    def attempt(self, function: Callable[[], None]) -> bool:
        """Calls a function that may be interrupted at any moment, and returns whether it finished."""
        try:
            with self._notice.interruptible():
                function()
        except Interrupted:
            return False
        return True

    def meet(self, place: Place, *, is_complete: bool, engine: int = -1, lost_by: str = "") -> Agreement:
        """Waits for all ranks on the store, and returns their conclusions; a collective.

        Args:
            place: Meeting place: ``generation`` after generating, ``ended`` after ending lost engines, ``restart`` after restarting them.
            is_complete: Whether this rank finished its work before the meeting.
            engine: Number of this rank's engine if that is lost; else -1.
            lost_by: Reason for the loss.
        """
        rest = self.pace.rest_s(float("inf")) if self._may_finish_step else float("-inf")
        if place != "generation":
            rest = float("inf")  # the generation's is not known
        words = self._exchange(place, self._word(is_complete, rest, engine, lost_by))
        lost = {word.engine: word.lost_by for word in reversed(words) if word.engine >= 0}
        deadlines = [word.deadline for word in words if word.deadline]
        now, rest = max(word.now for word in words), max(word.rest_s for word in words)
        self._met = time.monotonic()
        was_interrupted = not all(word.is_complete or word.engine >= 0 for word in words)
        return Agreement(was_interrupted or (bool(deadlines) and (bool(lost) or now + rest > min(deadlines))), lost)

    def step_done(self) -> None:
        """Records how long the step took, to predict the next ones."""
        self.pace.measure(self._met - self._began, time.monotonic() - self._met)

    def must_stop(self) -> bool:
        """Whether the job ends at this step boundary because some rank was asked to; a collective that waits on the store."""
        return any(word.deadline for word in self._exchange("step", self._word()))

    def _word(self, is_complete: bool = True, rest_s: float = 0.0, engine: int = -1, lost_by: str = "") -> _Word:
        notice, ending = self._notice, self.ending
        if ending is None and notice.is_set:  # as far as this rank knows before rank 0 knows better
            ending = find_ending(notice.number, notice.time, None, self._limits.notice_s)
        deadline = ending.deadline if ending else 0.0
        return _Word(notice.number, notice.time, deadline, time.time(), is_complete, rest_s, engine, lost_by)

    def _exchange(self, place: Place, word: _Word) -> list[_Word]:
        # Who generates and scores has the limit for each of the two; the watchdog ends what hangs before this does.
        limit_s = 2 * self._watchdog.limit_s(PHASES[place])
        self._notice.take_back()
        with self._watchdog.waiting():
            values = self._store.barrier(place, limit_s, json.dumps(asdict(word)))
        words = [_Word(**json.loads(value)) for value in values]
        signalled = [word for word in words if word.signal]
        if signalled and self.ending is None and self._store.info.rank == 0:  # the thread has not come to it
            self._find(signalled[0].signal, signalled[0].received)
        return words

    def _find(self, number: int, received: float) -> None:
        self.ending = find_ending(number, received, self._store.info, self._limits.notice_s)

    def _listen(self, store: JobStore, over: threading.Event) -> None:
        has_told = False
        while not over.is_set():
            if self._notice.wait(POLL_S) and not has_told:
                store.set(NOTICED, json.dumps([self._notice.number, self._notice.time]).encode())
                has_told = True
            if over.is_set():
                break
            self._learn(store)
            if self.ending and self._is_generating:
                rest = self.pace.rest_s(time.monotonic() - self._began)
                if not self._may_finish_step or time.time() + rest > self.ending.deadline:
                    self._notice.interrupt()

    def _learn(self, store: JobStore) -> None:
        """Learns what a notice means: rank 0 finds out, and tells the others through the store."""
        if self.ending is None and self._store.info.rank == 0 and store.check(NOTICED):
            number, received = json.loads(store.get(NOTICED, POLL_S))
            self._find(number, received)
            store.set(ENDING, json.dumps(asdict(self.ending)).encode())  # type: ignore[call-overload]
        elif self.ending is None and store.check(ENDING):
            self.ending = Ending(**json.loads(store.get(ENDING, POLL_S)))
