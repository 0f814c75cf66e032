"""Ends this rank when its job has failed, with the stacks of all its threads on disk.

Each rank has a thread that listens to rank 0's overseer; the main thread only tells it what it begins. Three things end a rank that does
not end by itself, each for when the one before cannot: the overseer's word, this thread's own clock, and a timer outside of Python, for a
main thread that holds the interpreter in C code.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import IO, Literal

from rlbatch.api import LaunchError
from rlbatch.config.machines import LaunchConfig
from rlbatch.launch.membership.messages import MachineLost
from rlbatch.launch.membership.overseer import ANSWER_S, DEATH_PATIENCE_S, ENDED, LEAVING_S, PATIENCE_S
from rlbatch.launch.membership.rendezvous import Meeting
from rlbatch.launch.membership.stack_locations import main_thread_location
from rlbatch.launch.membership.store_port import ends_at
from rlbatch.launch.records.attempt import is_superseded
from rlbatch.launch.records.failures import FirstError, Reported, StoppedBySignal, claim, failure_of, read_first_error
from rlbatch.launch.records.streams import output_hint
from rlbatch.launch.shutdown import guardian
from rlbatch.launch.shutdown.guardian import CLOSING_S
from rlbatch.launch.shutdown.signals import is_end_of_step

Phase = Literal["start", "generation", "training", "checkpoint"]
"""What a rank does; its hang limit is ``launch.<phase>_limit_s``."""

OWN_CLOCK_S = ANSWER_S + 4.0
"""Seconds past a hang limit after which a rank acts without the overseer."""
NATIVE_TIMER_S = 10.0
"""Seconds past a hang limit after which a rank ends without Python."""
SILENCE_S = 120.0
"""Seconds without a sign of life of rank 0's interpreter after which it counts as stopped."""
SHOW_CURSOR = b"\x1b[?25h"
SUCCESSION_S = 5.0
"""Seconds between looks whether another attempt has taken the run folder over."""


class Watchdog:
    """Tells rank 0 what this rank does, and ends this rank with its job.

    The beginning and the end of a phase are signs of life: the limit counts from there. Outside of phases that of ``training`` holds.
    Without a meeting nothing is watched.

    Attributes:
        on_rank_0_lost: Called by the rank that recorded that rank 0, which keeps the run's summary, is gone.
    """

    def __init__(self, limits: LaunchConfig, meeting: Meeting | None = None, run_dir: Path | None = None) -> None:
        self._limits, self._meeting = limits, meeting
        self._run_dir = run_dir or Path()
        self._phase, self._waits, self._since, self._deadline = "training", False, time.monotonic(), float("inf")
        self._reporting = False
        self._hosts: tuple[str, ...] = ()
        self._met, self._sealed, self._ended = threading.Event(), threading.Event(), threading.Event()
        self._leaving = False
        self._stacks: IO[str] | None = None
        self.on_rank_0_lost: Callable[[FirstError], None] = lambda error: None

    def __enter__(self) -> Watchdog:
        """Starts watching."""
        if self._meeting:
            with suppress(OSError):  # whoever needs the run folder says what is wrong with it
                (self._run_dir / "logs").mkdir(exist_ok=True)
                # Opened now: when it is needed, the file system may be what hangs.
                self._stacks = (self._run_dir / "logs" / f"rank{self._meeting.info.rank}.stacks").open("w", encoding="utf-8")
            for target in (self._listen, self._watch_succession):
                threading.Thread(target=target, name="rlbatch-watchdog", daemon=True).start()
        return self

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """Tells rank 0 of an error before what is open around this block is closed, which may hang: the others are told at once."""
        try:
            yield
        except StoppedBySignal:
            raise
        except BaseException as error:  # code that is not ours raises anything
            if not self._meeting:
                raise
            self._report(error)
            raise Reported(1) from None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None) -> None:
        """Leaves the job: tells why, and on rank 0 waits for the others."""
        if not self._meeting:
            return
        stopped = _signal_name(error)
        if isinstance(error, Reported):
            return
        if error is not None and not stopped:
            self._report(error)
            raise Reported(1) from None
        self.leave(stopped)

    def leave(self, stopped: str) -> None:
        """Tells that this rank ends as it should, or by which signal it was stopped; rank 0 waits for the others. On any thread."""
        if not self._meeting:
            return
        self._leaving = True
        faulthandler.cancel_dump_traceback_later()
        overseer = self._meeting.overseer
        if overseer and not overseer.has_met and stopped == "SIGTERM" and is_end_of_step(self._meeting.info):
            self._record(overseer.missing_ranks_error("srun ended the job (SIGTERM)", " See srun's lines above, and their logs in logs/."))
        with suppress(OSError):
            (self._run_dir / "logs" / f"rank{self._meeting.info.rank}.stacks").unlink()
        self._meeting.link.send({"left": stopped})
        if self._meeting.overseer:
            self._meeting.overseer.join(LEAVING_S + CLOSING_S)

    def wait_for_ranks(self) -> tuple[str, ...]:
        """Waits until every rank has joined, and returns the node of each. If some do not, rank 0 ends the job, and this process."""
        self._met.wait()
        return self._hosts

    def seal_store(self) -> None:
        """Waits until nobody but the ranks, which have come there, can come to the job's store; all of them call it."""
        assert self._meeting
        self._meeting.link.send({"ends": ends_at(self._meeting.info.master_port)})
        self._sealed.wait()

    def phase(self, name: Phase) -> AbstractContextManager[None]:
        """A context that tells what this rank does in it; of nested blocks the innermost counts."""
        return self._within(name, waits=False)

    def waiting(self) -> AbstractContextManager[None]:
        """A context in which this rank waits for others on the job's store as long as their phases may last, without a limit of its own."""
        return self._within(self._phase, waits=True)

    @contextmanager
    def _within(self, name: str, *, waits: bool) -> Iterator[None]:
        before = self._phase, self._waits
        self._enter(name, waits)
        try:
            yield
        except BaseException as error:
            guardian.left_by(error)
            raise
        finally:
            self._enter(*before)

    def limit_s(self, name: Phase) -> float:
        """Hang limit of a phase, seconds."""
        return float(getattr(self._limits, f"{name}_limit_s"))

    def _enter(self, name: str, waits: bool) -> None:
        limit_s = self.limit_s(name)  # type: ignore[arg-type]
        self._phase, self._waits, self._since = name, waits, time.monotonic()
        self._deadline = float("inf") if waits else self._since + limit_s
        guardian.tell(phase=name)
        if self._meeting and not self._leaving and not self._reporting:
            self._meeting.link.send({"phase": name, "limit_s": limit_s, "waits": waits})
            if waits:
                faulthandler.cancel_dump_traceback_later()
            else:
                faulthandler.dump_traceback_later(limit_s + NATIVE_TIMER_S, exit=True, file=self._stacks or sys.stderr)

    def _listen(self) -> None:
        """The thread: hears rank 0."""
        assert self._meeting
        link = self._meeting.link
        link.set_wait(0.5)
        heard = time.monotonic()
        while True:
            try:
                messages = link.receive()
            except ConnectionError as error:
                if not self._leaving:
                    if isinstance(error, MachineLost):
                        time.sleep(ANSWER_S)  # it may be this machine that is cut off: then rank 0 speaks
                    self._accuse_rank_0(str(error) if isinstance(error, MachineLost) else ENDED)
                return
            now = time.monotonic()
            heard = now if messages else heard
            for message in messages:
                if "where" in message:
                    location = main_thread_location()
                    link.send({"location": location.frames, "waits": location.waits or self._waits})
                if "hosts" in message:
                    self._hosts = tuple(message["hosts"])
                    self._met.set()
                if "sealed" in message:
                    self._sealed.set()
                if "launcher_ends_all" in message:
                    self._leaving = True
                if "end" in message:
                    self._end(str(message["end"]))
                    return
            if not self._leaving and (now > self._deadline + OWN_CLOCK_S or now > heard + SILENCE_S):
                self._accuse_rank_0("does not answer: it is stopped, or C code holds its interpreter")

    def _accuse_rank_0(self, what: str) -> None:
        """Reports the failure of rank 0, which otherwise decides on failures."""
        assert self._meeting
        time.sleep(DEATH_PATIENCE_S)  # a launcher that knows the exit code may speak
        info, location, seconds = self._meeting.info, main_thread_location(), time.monotonic() - self._since
        collective_s = self._limits.collective_timeout_s
        error = FirstError(0, self._meeting.attempt.host, "Exit", f"{what}. {output_hint(0)}", "", time.time())
        if what == ENDED and seconds >= collective_s and not (location.waits or self._waits):  # as in Overseer._decide
            text = f"launch.collective_timeout_s={collective_s:g}: rank 0 ended after {seconds:.0f} s. This rank is at {location}."
            error = FirstError(info.rank, info.host, "Hang", text, "\n".join(location.frames), time.time())
        if info.rank and self._record(error):
            self.on_rank_0_lost(error)
        first = read_first_error(self._run_dir)
        self._end(str(first) if first else f"rank 0 {what}")

    def _end(self, reason: str) -> None:
        """Ends this process, whatever its main thread does."""
        assert self._meeting
        faulthandler.dump_traceback_later(CLOSING_S, exit=True, file=self._stacks or sys.stderr)
        with suppress(OSError, ValueError):
            faulthandler.dump_traceback(file=self._stacks or sys.stderr)
        self._ended.set()
        if self._reporting:
            return  # the main thread is about to end this process
        if self._meeting.overseer:
            self._meeting.overseer.join(2 * ANSWER_S)
            if os.isatty(1):
                os.write(1, SHOW_CURSOR)  # the progress bar hides it
        elif not self._is_shared_output():
            with suppress(OSError):
                os.write(2, f"The job has failed: {reason}\n".encode())
        guardian.end(1)

    def _report(self, error: BaseException) -> None:
        """Tells rank 0 of this rank's failure and waits until the job's first error is recorded."""
        assert self._meeting
        if self._leaving:  # what others' ends did to it
            return
        self._reporting = True
        faulthandler.dump_traceback_later(PATIENCE_S + ANSWER_S + CLOSING_S, exit=True, file=self._stacks or sys.stderr)
        info = self._meeting.info
        failure = failure_of(guardian.in_words(error, info.world_size), info.rank, info.host, self._run_dir)
        if not self._is_shared_output():
            with suppress(OSError):  # its log may be on the disk that is full
                print(failure, file=sys.stderr, flush=True)
        self._meeting.link.send({"failed": asdict(failure), "follows": may_follow(error)})
        if not self._ended.wait(PATIENCE_S + ANSWER_S):
            self._record(failure)
        if self._meeting.overseer:
            self._meeting.overseer.join(2 * ANSWER_S)

    def _record(self, error: FirstError) -> bool:
        """Records an error in the run folder; returns whether it was the job's first."""
        assert self._meeting
        return not is_superseded(self._run_dir, self._meeting.attempt.token) and claim(self._run_dir, error)

    def _is_shared_output(self) -> bool:
        """Whether this rank's stderr is also where rank 0 prints the first error: then one of them is enough."""
        assert self._meeting
        rank = self._meeting.info.rank
        if not rank:
            return True
        with suppress(OSError):
            return not os.path.samestat(os.fstat(2), os.stat(self._run_dir / "logs" / f"rank{rank}.log"))
        return True

    def _watch_succession(self) -> None:
        """The other thread: ends this rank once the run folder is another attempt's. It may hang with the file system, and nothing else."""
        assert self._meeting
        while not self._ended.wait(SUCCESSION_S):
            if is_superseded(self._run_dir, self._meeting.attempt.token):
                info = self._meeting.info
                text = f"[rank {info.rank} host {info.host}] superseded: a later start of this job has taken {self._run_dir} over.\n"
                with suppress(OSError):
                    os.write(2, text.encode())
                guardian.end(1)


def _signal_name(error: BaseException | None) -> str:
    """The signal that stopped a rank; empty if none did."""
    if isinstance(error, StoppedBySignal) and isinstance(error.code, int):
        return signal.Signals(error.code - 128).name
    return ""


def may_follow(error: BaseException) -> bool:
    """Whether an error may be the consequence of another rank's: of a broken connection, or of a wait in vain."""
    if isinstance(error, LaunchError):
        return True
    kinds = {kind.__name__ for kind in type(error).__mro__}
    text = str(error)
    return bool(kinds & {"DistError", "ConnectionError"}) or "gloo/" in text or "NCCL" in text or "TCPStore" in text
