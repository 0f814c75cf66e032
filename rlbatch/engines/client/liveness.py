"""Tells whether an engine lives.

While something is awaited of it, it answers a ping or its processes work; else the processes that it needs are there.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import psutil

from rlbatch.api import EngineLost
from rlbatch.launch.ranks.children import resident_bytes, signal_group
from rlbatch.launch.records.disk import as_rollout_errors

PING_S = 5.0
"""Most seconds between two checks of an engine that is awaited."""
WATCH_S = 5.0
"""Seconds between two checks of an engine that is not awaited. Each asks the kernel for the state of the processes that it needs."""
WORKING_SHARE = 0.03
"""Share of a core: an engine of which no process uses as much only waits. (Those of an idle vLLM use less than 0.01 together.)"""
GUARD_S = 2.0
POLL_S = 0.05
STOPPED_S = 25.0
"""Longest time that one of an engine's processes may be stopped, whatever the others do."""
STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)


class Processes:
    """An engine's host and all that it started, as far as they were ever seen.

    Attributes:
        most_bytes: Resident memory of all that lived when they were last looked for, at most.
    """

    def __init__(self, pid: int) -> None:
        self._host, self.most_bytes = psutil.Process(pid), 0
        self._seen: set[psutil.Process] = set()
        self._needed: list[psutil.Process] = []

    def cpu_s(self) -> dict[psutil.Process, float]:
        """Processor seconds of each process that lives; empty if one of them is stopped, or the host has ended."""
        seconds: dict[psutil.Process, float] = {}
        try:
            for process in self.find():
                with suppress(psutil.NoSuchProcess):
                    if process.status() in STOPPED:
                        return {}
                    times = process.cpu_times()
                    seconds[process] = times.user + times.system
        except psutil.NoSuchProcess:
            return {}
        return seconds

    def find(self) -> list[psutil.Process]:
        """Finds the processes that live now, and remembers them, since nothing leads to them once the host is gone."""
        living = [self._host, *self._host.children(recursive=True)]
        self._seen.update(living)
        self.most_bytes = max(self.most_bytes, resident_bytes(living))
        return living

    def started(self, needed: Iterable[int]) -> None:
        """Notes the ids of the processes that the started engine needs until its end: others, such as compilers, may end before."""
        self.find()
        self._needed = [psutil.Process(pid) for pid in needed if psutil.pid_exists(pid)]

    def is_broken(self) -> bool:
        """Whether a process that the engine needs is gone: what is left of the engine may not have noticed."""
        return any(not process.is_running() or _is_over(process) for process in self._needed)

    def kill(self, limit_s: float) -> None:
        """Ends the host's group and what else there is, stopped ones too, and waits until they are gone: until then they hold an
        accelerator's memory.
        """
        with suppress(psutil.NoSuchProcess):
            self.find()
        if self._host.is_running() or not psutil.pid_exists(self._host.pid):  # else its id is another process's by now
            self._seen.update(self._group())
            signal_group(self._host.pid, signal.SIGKILL)
        self._wait(GUARD_S)  # the host's guard looks for those that left the group
        for process in self._seen:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self._wait(limit_s)

    def _group(self) -> Iterator[psutil.Process]:
        """The members of the host's group, which outlive it if it and its guard are killed."""
        for pid in psutil.pids():
            with suppress(OSError, psutil.NoSuchProcess):
                if os.getpgid(pid) == self._host.pid:
                    yield psutil.Process(pid)

    def _wait(self, limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        while not all(map(_is_over, self._seen)) and time.monotonic() < deadline:
            time.sleep(POLL_S)


def _is_over(process: psutil.Process) -> bool:
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


class PendingAnswer(Protocol):
    """A call that was sent."""

    def next(self, limit_s: float) -> object | None:
        """The call's next answer; None if none came within ``limit_s`` seconds."""


class WatchedEngine(Protocol):
    """What is asked of an engine whose life is watched; ``EngineHost`` is one."""

    @property
    def log(self) -> Path:
        """The engine's log."""

    @property
    def processes(self) -> Processes:
        """The engine's processes."""

    def check(self, operation: str = "") -> None:
        """Raises ``EngineLost`` if one of its processes has ended."""

    def lose(self, reason: str) -> EngineLost:
        """The error for an engine that is lost from here on."""

    def begin(self, operation: str) -> PendingAnswer:
        """Sends a call."""


class Liveness:
    """Signs of life of an engine that a call waits for. A ping is answered by the engine itself, not only by its host; while it loads
    weights or compiles it cannot answer, but works: at most ``busy_limit_s``, and ``hang_limit_s`` without any sign. Seconds in which this
    process itself stood still (a debugger, a suspended job, a busy machine) say nothing of the engine, and do not count.
    """

    def __init__(self, engine: WatchedEngine, operation: str, hang_limit_s: float, busy_limit_s: float) -> None:
        self._engine, self._operation, self._hang_limit_s, self._busy_limit_s = engine, operation, hang_limit_s, busy_limit_s
        self._answered = self._worked = self._checked = self._sent = self._ran = self._due = time.monotonic()
        self._cpu_s: dict[psutil.Process, float] | None = None  # the first check measures
        self._ping: PendingAnswer | None = None

    def wait_s(self) -> float:
        """Seconds until the next check, from now on."""
        now = time.monotonic()
        wait_s = min(PING_S, self._hang_limit_s / 4, max(self._hang_limit_s - (now - self._last()), 0.05))
        self._due = now + wait_s
        return wait_s

    def answered(self) -> None:
        """Notes that the awaited call got an answer, and still checks at times: of several replicas one may be lost while others answer."""
        self._answered = time.monotonic()
        if self._answered - self._checked > PING_S:
            self.check()

    def check(self) -> None:
        """Looks for signs of life, when nothing came for ``wait_s``, or only one part of the engine has answered.

        Raises:
            EngineLost: it is dead, or gave no sign of life for too long.
            RolloutError: the system does not let anybody look, e.g. because a limit of open files is reached.
        """
        with as_rollout_errors(f"the engine cannot be looked at (`{self._operation}`)", self._engine.log):
            self._check()

    def _check(self) -> None:
        self._engine.check(self._operation)
        now = self._leave_out(self._due)
        self._see_work()
        if self._hang_limit_s < float("inf"):  # else it starts, and answers nothing
            self._ask()
        for limit_s, since, what in (
            (self._hang_limit_s, self._last(), "no sign of life"),
            (self._busy_limit_s, self._answered, "it works, but answers nothing"),
            (self._busy_limit_s, self._sent if self._ping else now, "a part of it answers nothing"),
            (min(self._hang_limit_s, STOPPED_S), self._ran, "one of its processes is stopped,"),
        ):
            if now - since > limit_s:
                raise self._engine.lose(f"`{self._operation}`: {what} for {limit_s:g} s")
        self._leave_out(now)

    def _leave_out(self, since: float) -> float:
        """Leaves the time since then out of all clocks of the engine; returns the time now."""
        now = time.monotonic()
        marks, late_s = (self._answered, self._worked, self._sent, self._ran), max(now - since, 0.0)
        self._answered, self._worked, self._sent, self._ran = (min(now, mark + late_s) for mark in marks)
        return now

    def _ask(self) -> None:
        if self._ping is None:
            self._ping, self._sent = self._engine.begin("ping"), time.monotonic()
        elif self._ping.next(0.0) is not None:
            self._ping, self._answered = None, max(self._answered, self._sent)  # it lived then; what came later is not known

    def _last(self) -> float:
        return max(self._answered, self._worked)

    def _see_work(self) -> None:
        now, cpu_s = time.monotonic(), self._engine.processes.cpu_s()
        before = cpu_s if self._cpu_s is None else self._cpu_s
        used = [seconds - before[process] for process, seconds in cpu_s.items() if process in before]
        if max(used, default=0.0) > WORKING_SHARE * (now - self._checked):
            self._worked = now
        if cpu_s or before or self._cpu_s is None:
            self._ran = now  # or the time at which one was first seen stopped
        self._checked, self._cpu_s = now, cpu_s


class IdleWatch:
    """A thread that looks at an engine until its end, which it notes: the next call fails, and the engine's log says when it was."""

    def __init__(self, engine: WatchedEngine) -> None:
        self._engine, self._over = engine, threading.Event()
        self._thread = threading.Thread(target=self._check, daemon=True, name="engine-watch")
        self._thread.start()

    def end(self) -> None:
        """Stops the watch: processes that end from here on are meant to end."""
        self._over.set()
        self._thread.join()

    def _check(self) -> None:
        while not self._over.wait(WATCH_S):
            try:
                self._engine.check()
            except EngineLost as lost:
                self._note(lost)
                return
            except OSError:  # the system does not let anybody look now, e.g. because a limit of open files is reached
                continue

    def _note(self, lost: EngineLost) -> None:
        with suppress(OSError), self._engine.log.open("a") as log:
            log.write(f"\n{time.strftime('%Y-%m-%d %H:%M:%S')} {lost.reason}\n")
