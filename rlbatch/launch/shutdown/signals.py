"""Signals that ask a rank to stop: the time limit is near, the job is preempted or cancelled."""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType

from rlbatch.launch.ranks.children import END_SIGNAL
from rlbatch.launch.ranks.rank_info import RankInfo
from rlbatch.launch.records.failures import StoppedBySignal
from rlbatch.launch.slurm.scontrol import find_current_job, kill_wait_s, slurm_job_id

STOP_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGHUP)
INTERRUPT = signal.SIGRTMAX
"""Sent by a thread of this process to its main thread, which may be anywhere: a signal that nobody else has a use for."""
REPEAT_S = 10.0
"""Seconds for what is interrupted to clean up; code that goes on instead is interrupted again."""
LOOK_S, STUCK_S = 0.5, 1.0
"""Seconds between looks whether a rank has started, and those that its main thread has for a signal before."""
KILL_WAIT_S = 30.0
"""Seconds from SIGTERM to SIGKILL where nobody says otherwise: Slurm's KillWait, as it is set by default."""


class Interrupted(BaseException):
    """Ends what a rank does between ``interruptible`` and its end. No ``Exception``: engines must not take it for a failure of theirs."""


class StopNotice:
    """Whether this process was asked to stop.

    A thread may wait for the signal: the process's main thread can be inside a collective, where no Python code runs.

    Attributes:
        number: The first signal that came; 0: none.
        time: When it came, seconds since the epoch.
    """

    def __init__(self) -> None:
        """No signal has come; none is received before ``install``."""
        self.number, self.time, self._pid = 0, 0.0, 0
        self._is_installed, self._signals = False, tuple(_heeded())
        self._ends_at_once, self._is_ending, self._is_left = True, False, False
        self._is_interrupting, self._is_inside, self._quiet_until = False, False, 0.0
        self._woken, self._waker = os.pipe()
        os.set_blocking(self._woken, False)
        os.set_blocking(self._waker, False)

    @property
    def is_set(self) -> bool:
        """Whether a signal came."""
        return self.number != 0

    def install(self) -> None:
        """Takes the stop signals over from whoever had them; on the main thread.

        Until ``started`` they end this process at once, as SIGINT and ``END_SIGNAL`` always do.
        """
        self._is_installed = True
        handlers = {
            **dict.fromkeys(self._signals, self._receive),
            signal.SIGINT: self._end,
            END_SIGNAL: self._end,
            INTERRUPT: self._break_off,
        }
        for number, handler in handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._waker, warn_on_full_buffer=False)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, handlers)

    def take_back(self) -> None:
        """Installs again what foreign code, which has just run on the main thread, may have replaced, blocked or ignored."""
        if self._pid not in (0, os.getpid()):  # foreign code forked, and its child came back here: it is no rank
            os._exit(1)
        if self._is_installed:
            self.install()

    def end_start(self, leave: Callable[[int], None]) -> None:
        """Lets a signal end this process, until ``started``, also if the main thread waits in C code, where it does not get to it.

        Args:
            leave: Called with the signal, on a thread, where the main thread did nothing for ``STUCK_S``; does not return.
        """
        threading.Thread(target=self._end_start, args=(leave,), daemon=True, name="rlbatch-start").start()

    def _end_start(self, leave: Callable[[int], None]) -> None:
        while self._ends_at_once:
            if not select.select([self._woken], [], [], LOOK_S)[0]:  # it is read by who waits for signals after the start
                continue
            time.sleep(STUCK_S)
            if self._is_ending or not self._ends_at_once:
                return
            if self.wait(0.0):
                self._is_left = True
                leave(self.number)
                return

    def started(self) -> None:
        """Tells that this process has something to save from here on: signals are noticed, and end nothing."""
        self._ends_at_once, self._pid = False, os.getpid()

    def wait(self, seconds: float) -> bool:
        """Waits for a signal, on any thread, and returns whether one has ever come."""
        if select.select([self._woken], [], [], seconds)[0]:
            for number in os.read(self._woken, 4096):
                if number in self._signals:
                    self._record(number)
        return self.is_set

    def post(self, number: int) -> None:
        """Tells of a signal that came to another process, a fork of this one, so that ``wait`` ends; 0 only ends ``wait``."""
        with suppress(BlockingIOError):  # full: it was told often enough
            os.write(self._waker, bytes([number]))

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """A context that a signal leaves at any moment, by raising Interrupted; only for the main thread, and without collectives in it."""
        self._is_inside, self._quiet_until = True, 0.0
        try:
            if self._is_interrupting:
                raise Interrupted
            yield
        finally:
            self._is_inside = False
            self.take_back()

    def interrupt(self) -> None:
        """Leaves the ``interruptible`` block that the main thread is in, and every later one at its beginning."""
        self._is_interrupting = True
        main = threading.main_thread().ident
        if self._is_inside and main is not None:
            signal.pthread_kill(main, INTERRUPT)  # ends a system call that it waits in

    def _break_off(self, number: int, frame: FrameType | None) -> None:
        if self._is_inside and time.monotonic() >= self._quiet_until:
            self._quiet_until = time.monotonic() + REPEAT_S  # what cleans up must not be interrupted too
            raise Interrupted

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self._is_left:
            threading.Event().wait()  # the thread ends this process
        self._record(number)
        if self._ends_at_once:
            self._end(self.number, frame)  # the first one: where one rank ends, srun sends SIGTERM to the others

    def _end(self, number: int, frame: FrameType | None) -> None:
        if not self._is_ending:  # once: several processes may pass the same signal on
            self._is_ending = True
            raise StoppedBySignal(128 + number)

    def _record(self, number: int) -> None:
        if not self.is_set:
            self.time = time.time()
            self.number = number


def _heeded() -> Iterator[signal.Signals]:
    """``STOP_SIGNALS`` without SIGHUP if that is ignored, as after `nohup`."""
    return (number for number in STOP_SIGNALS if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN)


@contextmanager
def received_signals() -> Iterator[list[int]]:
    """Gives a launcher a list to which Ctrl-C and the signals that ask the job to stop append their number."""
    received: list[int] = []

    def receive(number: int, frame: FrameType | None) -> None:
        received.append(number)

    previous = {number: signal.signal(number, receive) for number in (signal.SIGINT, *_heeded())}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def signal_name(number: int) -> str:
    """A signal's name, such as ``SIGKILL``; for real-time signals the C library's words."""
    return next((known.name for known in signal.Signals if known == number), None) or signal.strsignal(number) or f"signal {number}"


def ignore_signals() -> None:
    """Ignores signals in a process that has nothing left to end: one would only put a traceback into the interpreter's own end."""
    for number in (*STOP_SIGNALS, signal.SIGINT, END_SIGNAL):
        signal.signal(number, signal.SIG_IGN)


@dataclass(frozen=True)
class Ending:
    """Why a job has to end, and when.

    Attributes:
        why: The reason, for people, e.g. ``preempted (SIGUSR1)``.
        deadline: Seconds since the epoch.
        is_cancelled: Whether somebody wanted its end: it must not be queued again.
    """

    why: str
    deadline: float
    is_cancelled: bool = False


def find_ending(number: int, received: float, info: RankInfo | None, notice_s: float | None) -> Ending:
    """What a stop signal means for the job: Slurm is asked if it runs the job.

    Args:
        number: The signal.
        received: When it came, seconds since the epoch.
        info: The job; None: Slurm is not asked.
        notice_s: ``launch.notice_s``: seconds from the signal to the end where Slurm does not say it.
    """
    name = signal.Signals(number).name
    announced = received + (KILL_WAIT_S if notice_s is None else notice_s)
    job_id = slurm_job_id(info) if info else ""
    job = find_current_job(job_id) if job_id else None
    if info is None or job is None:
        return Ending(name, announced)
    killed = received + (kill_wait_s() or KILL_WAIT_S)
    if job.restarts > info.restart_count:
        return Ending(f"queued again by Slurm ({name})", killed)
    if job.is_preempted:
        return Ending(f"preempted ({name})", job.end_time or announced)
    if job.reason == "TimeLimit":
        return Ending(f"time limit ({name})", killed)
    if job.state != "RUNNING" or number == signal.SIGTERM:  # SIGTERM to the step alone: cancelled, or one of its ranks failed
        return Ending(f"cancelled ({name})", killed, is_cancelled=True)
    if job.end_time is None:
        return Ending(name, announced)
    return Ending(f"{name} {job.end_time - received:.0f} s before the time limit", job.end_time)


def is_end_of_step(info: RankInfo) -> bool:
    """Whether a SIGTERM says that srun ends the ranks because one has ended, and Slurm wants nothing of the job."""
    job_id = slurm_job_id(info)
    job = find_current_job(job_id) if job_id else None
    is_wanted = job is None or job.is_preempted or job.reason == "TimeLimit" or job.restarts > info.restart_count
    return not is_wanted and job is not None and job.state == "RUNNING"
