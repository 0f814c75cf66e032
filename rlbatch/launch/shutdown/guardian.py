"""Two parent processes of each rank, which pass signals down to it and kill what it leaves behind.

What starts a rank sees the upper one; each of them is a fork from before the rank has threads. They pass signals down and the rank's end
up, and when it has ended, kill all processes that it started, and those these started: whoever loses its parent comes up to them. Two,
because one may be killed with SIGKILL too: then the other ends the rest.

An exit code is believed only of a rank that has said it: code that is not ours may end the process with 0 at any moment.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import resource
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

import psutil

from rlbatch.api import ConfigError
from rlbatch.api.exit_codes import STOPPED
from rlbatch.launch.ranks.children import END_SIGNAL, dies_with_parent, resident_bytes
from rlbatch.launch.ranks.host_memory import address_limit, none_left, oom_kills, refused
from rlbatch.launch.ranks.rank_info import RankInfo, visible_gpus
from rlbatch.launch.records.attempt import is_superseded
from rlbatch.launch.records.failures import FirstError, claim, read_first_error, tell_user
from rlbatch.launch.records.streams import output_hint
from rlbatch.launch.shutdown.signals import STOP_SIGNALS, StopNotice, signal_name
from rlbatch.plan.accounting import out_of_host_memory

CLOSING_S = 8.0
"""Most seconds from the end of the job to the end of a rank's threads, and of what its code does at exit."""
TEARDOWN_S = 60.0
"""Most seconds from there to the end of the rank's process. The interpreter frees what it holds then: only a machine's load delays that."""
EXEC_S = 1.0
"""Seconds that a process may live on after it has let go of its line to its guardian."""
KILL_S, PASS_S = 5.0, 0.01
"""Longest wait for killed processes to be gone, as those that wait for a device are not; seconds between two looks."""
ORPHANED = signal.SIGALRM
"""Signal that a guardian gets when the process above it ends."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_PASSED = (*STOP_SIGNALS, signal.SIGINT, END_SIGNAL)
_WATCHED = (*_PASSED, signal.SIGCHLD, ORPHANED)

RankFacts = Mapping[str, Any]
_line: int | None = None
_told: dict[str, Any] = {}
_then: tuple[int, RankFacts] | None = None
"""Identity of an error, and what this rank had told when the error left the phase that it is of."""
ABORT_PATIENCE_S = 2.0
"""Seconds in which others may say why a rank aborted."""


def tell(**facts: object) -> None:
    """Tells the process above this rank something; the last word counts. Without one nothing happens."""
    _told.update(facts)
    if _line is not None:
        with suppress(OSError):  # it is gone, or stopped: no reason to wait
            os.write(_line, json.dumps(facts).encode() + b"\n")


def told() -> RankFacts:
    """All that this rank has told."""
    return _told


def left_by(error: BaseException) -> None:
    """Keeps what this rank has told by now for ``in_words``: phases around the one that an error leaves go on to tell theirs."""
    global _then
    if _then is None or _then[0] != id(error):
        _then = id(error), dict(_told)


def end(code: int) -> NoReturn:
    """Ends this process at once, as it should."""
    tell(end=code)
    os._exit(code)


@contextmanager
def guarded(notice: StopNotice, on_death: Callable[[str, RankFacts], None], on_hang: Callable[[str], None]) -> Iterator[None]:
    """Forks twice and goes on in the lowest process, whose end is that of the block, with its exit code, within ``CLOSING_S``.

    Call it before there are threads. The other two processes do not return from here.

    Args:
        notice: Told of the signals that ask the rank to stop, whatever became of the handlers in its process.
        on_death: Called above the rank if it ended without having said so, and nobody else is left who would: how, and what it told before.
        on_hang: Called above the rank if it said so and did not end: what held it.
    """
    global _line
    sys.stdout.flush()
    sys.stderr.flush()
    before, upper = signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED), os.getpid()
    launcher = os.pidfd_open(os.getppid())
    if child := _fork_below():
        _Guardian(child).watch()
    os.setsid()  # what is done to the group of the upper one does not reach us
    reading, _line = os.pipe()
    os.set_blocking(_line, False)
    dies = dies_with_parent()
    if child := _fork_below():
        os.close(_line)
        _LowerGuardian(child, upper, launcher, reading, notice, on_death, on_hang).watch()
    dies()
    os.setpgid(0, 0)
    os.close(reading)
    os.close(launcher)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    atexit.register(tell, is_over=True)  # the first to be registered is the last to be called
    code: object = 1
    try:
        yield
        code = 0
    except SystemExit as ended:
        code = ended.code
        raise
    finally:
        held = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread() and not thread.daemon]
        tell(end=code if isinstance(code, int) else int(code is not None), threads=held)
        atexit.register(tell, threads=[])  # it is called when they have ended


def _fork_below() -> int:
    """Forks a process whose orphans come up to this one, from its first moment on."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)  # not inherited
    return os.fork()


class _Guardian:
    """The upper process above a rank; ``child`` is the lower one."""

    def __init__(self, child: int) -> None:
        self._child, self._status, self._kill_at = child, -1, float("inf")
        self._most_bytes = 0
        self._woken, waker = os.pipe()
        os.set_blocking(waker, False)
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        for number in _WATCHED:
            signal.signal(number, lambda number, frame: None)
        Path("/proc/self/comm").write_text("rlbatch-guard", encoding="ascii")  # the command line is the rank's
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _WATCHED)

    def watch(self) -> NoReturn:
        """Watches until the child has ended; then this process ends in the same way."""
        try:
            while not self._has_ended():
                self._wait([])
            self._look()
            # At once: rank 0 waits a moment for it, and finding descendants takes a while. In a thread: a file system may hang.
            telling = threading.Thread(target=self._tell)
            telling.start()
            _kill_descendants()
            telling.join()
            self._conclude()
        except Exception:  # nothing is above that would tell it
            traceback.print_exc()
        finally:
            os._exit(1)

    def _look(self) -> None:
        """Looks at what the child has left, before it is gone."""

    def _tell(self) -> None:
        """Reports the child's end, if there is something to say of it."""

    def _conclude(self) -> None:
        """Ends this process as the child did."""
        if not os.WIFSIGNALED(self._status):
            os._exit(os.WEXITSTATUS(self._status))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        number = os.WTERMSIG(self._status)
        with suppress(OSError):  # SIGKILL
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        os._exit(128 + number)

    def _wait(self, others: list[int]) -> list[int]:
        """Passes signals on that came, and returns which of the other descriptors have something to read."""
        left = self._kill_at - time.monotonic()
        ready, _, _ = select.select([self._woken, *others], [], [], max(left, 0.0) if left < float("inf") else None)
        if self._woken in ready:
            for number in os.read(self._woken, 512):
                if number in _PASSED:
                    self._pass(number)
        return ready

    def _pass(self, number: int) -> None:
        os.kill(self._child, number)  # it has not been asked for yet: its id is still its own

    def _has_ended(self) -> bool:
        """Collects children that have ended; returns whether the watched one is among them."""
        with suppress(ChildProcessError):
            while (ended := os.wait4(-1, os.WNOHANG | os.WUNTRACED))[0]:
                if ended[0] == self._child and os.WIFSTOPPED(ended[1]):
                    self._stopped()
                elif ended[0] == self._child:
                    self._status, self._most_bytes = ended[1], 1024 * ended[2].ru_maxrss
        return self._status >= 0

    def _stopped(self) -> None:
        os.kill(self._child, signal.SIGCONT)  # the lower one does no work that somebody could want to stop


class _LowerGuardian(_Guardian):
    """The lower process, which hears on ``line`` what the rank, its child, says of itself; ``launcher`` is a descriptor of the process that
    started the upper one. The others are as of ``guarded``.
    """

    def __init__(
        self,
        child: int,
        parent: int,
        launcher: int,
        line: int,
        notice: StopNotice,
        on_death: Callable[[str, RankFacts], None],
        on_hang: Callable[[str], None],
    ) -> None:
        super().__init__(child)
        self._parent, self._line, self._notice, self._on_death, self._on_hang = parent, line, notice, on_death, on_hang
        self._launcher = launcher
        self._kills = oom_kills()
        self._unread, self._facts, self._is_open, self._was_killed = b"", dict[str, Any](), True, False
        os.set_blocking(line, False)
        _prctl(_PR_SET_PDEATHSIG, ORPHANED)

    def _wait(self, others: list[int]) -> list[int]:
        if self._is_orphan():
            os.kill(self._child, signal.SIGKILL)
        elif time.monotonic() > self._kill_at:
            self._kill_at = float("inf")
            self._was_killed = os.path.exists(f"/proc/{self._child}/exe")  # else it ends: its memory is gone
            if self._was_killed:
                os.kill(self._child, signal.SIGKILL)
        ready = super()._wait([self._line] if self._is_open else [])
        if self._line in ready:
            self._hear()
        return ready

    def _is_orphan(self) -> bool:
        return os.getppid() != self._parent

    def _hear(self) -> None:
        """Reads what the rank has said."""
        part = os.read(self._line, 1 << 16)
        *lines, self._unread = (self._unread + part).split(b"\n")
        for line in lines:
            facts = json.loads(line)
            self._facts |= facts
            if "end" in facts or "is_over" in facts:
                self._kill_at = time.monotonic() + (CLOSING_S if "end" in facts else TEARDOWN_S)
        self._is_open = bool(part)
        if not part and "end" not in self._facts:
            self._kill_at = time.monotonic() + EXEC_S

    def _pass(self, number: int) -> None:
        if number in STOP_SIGNALS:
            self._notice.post(number)
        super()._pass(number)

    def _stopped(self) -> None:
        """Called for a stopped child; does nothing, as the job has limits for ranks that do nothing."""

    def _look(self) -> None:
        if os.waitstatus_to_exitcode(self._status) == -signal.SIGKILL and oom_kills() > self._kills:
            self._facts |= {"most_bytes": self._most_bytes, "other_bytes": bytes_of_descendants()}

    def _tell(self) -> None:
        with suppress(BlockingIOError):
            while self._is_open:
                self._hear()
        if "end" in self._facts:
            if self._was_killed and "is_over" not in self._facts and not self._is_orphan():
                threads = self._facts.get("threads")
                self._on_hang(f"its threads {', '.join(threads)}" if threads else "what its code does at exit")
        elif not self._is_orphan():
            self._on_death(self._how(), self._facts)
        elif select.select([self._launcher], [], [], 0)[0]:  # else it lives, and says how the job ended
            self._on_death("what started it was killed", self._facts)

    def _how(self) -> str:
        code = os.waitstatus_to_exitcode(self._status)
        if self._was_killed:
            return "it has become another program (exec), or closed all its files"
        if "most_bytes" in self._facts:
            return f"killed by the system: {none_left()}"
        if code < 0:
            limit = address_limit()
            why = f", with {limit}" if limit else ", out of memory?" if -code == signal.SIGKILL else ""
            return f"killed by {signal_name(-code)}{why}"
        return f"exit code {code}: os._exit, or exit() in C code"

    def _conclude(self) -> None:
        if self._is_orphan():
            return
        os.kill(self._parent, signal.SIGCONT)
        if "end" in self._facts:
            os._exit(self._facts["end"])
        if self._was_killed or os.waitstatus_to_exitcode(self._status) in (0, STOPPED):
            os._exit(1)
        super()._conclude()


def _kill_descendants() -> None:
    """Kills all processes below this one. Those whose parent goes come up to this one and are found by the next pass. psutil misses one
    whose parent goes while it looks, so the end is when this process has no child left.
    """
    until = time.monotonic() + KILL_S
    with suppress(ChildProcessError):
        while time.monotonic() < until:
            for process in psutil.Process().children(recursive=True):
                with suppress(psutil.Error):
                    process.kill()
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
            time.sleep(PASS_S)


def bytes_of_descendants() -> int:
    """Resident memory of all processes below this one."""
    return resident_bytes(psutil.Process().children(recursive=True))


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def report_death(run_dir: Path, info: RankInfo, how: str, told: RankFacts) -> FirstError | None:
    """Records and prints that a rank ended without having said why, unless another failure came first. Returns the job's first error; None:
    the run folder is another attempt's.
    """
    if "token" in told and is_superseded(run_dir, told["token"]):
        return None
    if "SIGABRT" in how and not address_limit():  # as NCCL ends ranks whose peer hangs: who finds that one speaks first
        time.sleep(ABORT_PATIENCE_S)
    where = f"in phase {told.get('phase', 'start')}."
    if "most_bytes" in told:
        where = explained(told, told["most_bytes"], told["other_bytes"]) or f"{where} Ask for more (--mem)."
    text = f"ended without a word ({how}), {where} {output_hint(info.rank)}"
    error = FirstError(info.rank, info.host, "Exit", text, "", time.time())
    claim(run_dir, error)
    return read_first_error(run_dir) or error


def explained(told: RankFacts, most: int, others: int) -> str:
    """What a rank took of a host's memory when none was left, in words; see ``out_of_host_memory``."""
    return out_of_host_memory(told, most, others, on_gpu=visible_gpus() > 0, limit="ulimit -v" if address_limit() else "--mem")


def in_words(error: BaseException, world_size: int) -> BaseException:
    """The error that a rank tells of another: if the system refused it memory, one that says what outgrew its plan."""
    try:
        said = refused(error)
        most = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        facts = _then[1] if _then and _then[0] == id(error) else told()
        if said and (why := explained(facts, most, bytes_of_descendants())):
            limit = f", of {address_limit()}" if address_limit() else ""
            return ConfigError(f"layout.world_size={world_size}: no memory was left on the host{limit}, {why} ({said})")
    except (MemoryError, OSError):  # nor is there any for this
        pass
    return error


def report_remains(info: RankInfo, held: str) -> None:
    """Prints that a rank came to its end, and its process did not."""
    who = f"[rank {info.rank} host {info.host}]"
    tell_user(f"{who} came to its end, but its process did not for {CLOSING_S:g} s, because of {held}. It was killed.")
