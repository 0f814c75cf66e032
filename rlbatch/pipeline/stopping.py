"""Decides when a job that was asked to stop does so: at the next step boundary if there is time for it, else before the step's update.

All ranks decide alike, from what every rank said where all of them met: a signal may have reached only some.
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
"""Seconds between looks at what other ranks know."""
RECENT_STEPS = 5
"""Steps whose longest tells how long the next one may take."""
Place = Literal["generation", "ended", "restart", "step"]
PHASES: Mapping[Place, Phase] = {"generation": "generation", "ended": "training", "restart": "start", "step": "training"}
"""Places where ranks meet, and what the others may still be at."""
NOTICED, ENDING = "stop/noticed", "stop/ending"
"""Keys of the job's store: the signal that a rank got, and what rank 0 found out about it."""


class Pace:
    """How long this job's steps and saves take; ``save_s`` is an estimate, until one was measured."""

    def __init__(self, save_s: float) -> None:
        self.save_s = save_s
        self._steps: deque[tuple[float, float]] = deque(maxlen=RECENT_STEPS)

    def measure(self, before_s: float, after_s: float) -> None:
        """Takes a step's seconds until all ranks had generated, and after that."""
        self._steps.append((before_s, after_s))

    def rest_s(self, elapsed_s: float) -> float:
        """Longest that it may take from within a step's generation to the end of a save after that step; infinite in the first step.

        Args:
            elapsed_s: Since the step began; infinite: all ranks have generated.
        """
        if not self._steps:
            return float("inf")
        before, after = max(step[0] for step in self._steps), max(step[1] for step in self._steps)
        return max(before - elapsed_s, 0.0) + after + self.save_s


@dataclass(frozen=True)
class _Word:
    """What a rank says where all of them meet.

    Attributes:
        signal: That it got; 0: none.
        received: When, seconds since the epoch.
        deadline: Of the job as far as it knows, seconds since the epoch; 0: it knows of none.
        now: Its clock.
        is_complete: Whether it has done what it came from.
        rest_s: What it takes to go on and save.
        engine: That it knows to be lost; -1: none.
        lost_by: Why.
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
    """What all ranks know alike once they have met in a generation.

    Attributes:
        must_leave: Whether the job ends here, in the middle of a step, before anything was changed.
        lost: Engines that are lost, and why.
    """

    must_leave: bool
    lost: Mapping[int, str]


class Stopping:
    """A job's way to an early end, on one rank; ``save_s`` is an estimate of a save. ``ending`` is why and when the job ends, once this
    rank knows.
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
        """Keeps signals from ending anything at once: a thread learns what other ranks know, and interrupts generation if it must."""
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
        """Around a generation and what belongs to it. After a notice it goes on as long as there is time for the whole step, if it may;
        else it ends at once.
        """
        self._began, self._may_finish_step, self._is_generating = time.monotonic(), may_finish, True
        try:
            yield
        finally:
            self._is_generating = False

    def attempt(self, function: Callable[[], None]) -> bool:
        """Calls what may be left at any moment, as generation is, and returns whether it came to its end."""
        try:
            with self._notice.interruptible():
                function()
        except Interrupted:
            return False
        return True

    def meet(self, place: Place, *, is_complete: bool, engine: int = -1, lost_by: str = "") -> Agreement:
        """Waits for all ranks, on the store; a collective.

        Args:
            place: ``generation``: they have generated; ``ended``, ``restart``: they have ended lost engines, and started them anew.
            is_complete: Whether this rank did all that it had to do there.
            engine: Number of this rank's engine if that is lost; -1: it is not.
            lost_by: Why it is lost.
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
        """Keeps how long the step took, for the next ones."""
        self.pace.measure(self._met - self._began, time.monotonic() - self._met)

    def must_stop(self) -> bool:
        """Whether the job ends at this step boundary: some rank was asked to; a collective that waits on the store."""
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
        """Rank 0 finds out what a notice means, for all."""
        if self.ending is None and self._store.info.rank == 0 and store.check(NOTICED):
            number, received = json.loads(store.get(NOTICED, POLL_S))
            self._find(number, received)
            store.set(ENDING, json.dumps(asdict(self.ending)).encode())  # type: ignore[call-overload]
        elif self.ending is None and store.check(ENDING):
            self.ending = Ending(**json.loads(store.get(ENDING, POLL_S)))
