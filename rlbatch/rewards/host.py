"""The process beside a rank in which its rewards are loaded. Workers are its copies: one that hangs is killed and replaced in milliseconds.

``python -m rlbatch.rewards.host FD``: the rank's end of the socket is its only argument. It ends when the rank does, with all that
rewards have started.
"""

from __future__ import annotations

import ctypes
import json
import os
import pickle
import resource
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import psutil

from rlbatch import reward_parts
from rlbatch.api import PluginError, RlbatchError
from rlbatch.launch.ranks.children import END_SIGNAL, children_end_with_this_process, dies_with_parent, signal_group
from rlbatch.launch.shutdown.signals import STOP_SIGNALS, signal_name
from rlbatch.registry import load_plugins
from rlbatch.rewards.frames import LARGEST_ANSWER, SETUP, Frame, Peer, Setup
from rlbatch.rewards.score import prepare
from rlbatch.rewards.worker import Scoring, serve

SLOW_S, SLOW_TIMES, MOST_SLOW = 0.1, 20.0, 64
"""A task that takes longer than ``SLOW_S`` seconds and ``SLOW_TIMES`` the mean may make room: at most ``MOST_SLOW`` more workers start."""
TICK_S, KILL_S = 0.05, 5.0
"""Most seconds to wait for killed processes to be gone, between other work and at the end."""
OUT_OF_MEMORY = 113
"""Exit code of a worker that gets no more."""
_PR_SET_CHILD_SUBREAPER = 36


@dataclass
class _Worker:
    """A process that scores.

    Attributes:
        pid: Its id, and that of its session.
        peer: The way to it.
        task: What it is at.
        began: When it began with that, as if it had never stood still.
        look_s: How long after that it is to be looked at, if it is slow.
        is_slow: Whether it makes room for another.
        still_since: When it was stopped; None: it goes.
    """

    pid: int
    peer: Peer
    task: Frame | None = None
    began: float = 0.0
    look_s: float = 0.0
    is_slow: bool = False
    still_since: float | None = None

    def __post_init__(self) -> None:
        """Starts the clocks: the worker has computed nothing yet."""
        self._process = psutil.Process(self.pid)
        self._taken = (0.0, 0.0)

    def begin(self, task: Frame) -> None:
        """Gives the worker a task."""
        self.task, self.began, self.look_s, self._taken = task, time.monotonic(), 0.0, _processor_s(self._process)
        self.peer.send(task)

    def computed_s(self) -> float:
        """Processor seconds that the worker itself has taken for its task."""
        return _processor_s(self._process)[0] - self._taken[0]

    def children_s(self) -> float:
        """Processor seconds that processes of the worker have taken for its task."""
        with suppress(psutil.Error):
            living = sum(sum(_processor_s(child)) for child in self._process.children(recursive=True))
            return _processor_s(self._process)[1] - self._taken[1] + living
        return 0.0

    def stand_still(self, now: float) -> None:
        """Stops the worker and its clock."""
        self.still_since = now
        signal_group(self.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        """Lets the worker go on, if it stands still."""
        if self.still_since is not None:
            self.began += time.monotonic() - self.still_since
            self.still_since = None
            signal_group(self.pid, signal.SIGCONT)


@dataclass
class RewardHost:
    """Deals tasks out to workers, in the order in which they come.

    Attributes:
        rank: The way to the rank.
        score: What workers do.
        limit: Workers at once, without those that make room.
        kept: Children that are no workers.
        waiting: Tasks that nobody is at.
    """

    rank: Peer
    score: Scoring
    limit: int
    kept: frozenset[int]
    waiting: deque[Frame]
    _workers: dict[int, _Worker] = field(default_factory=dict)
    _mean_s: float = 0.0
    _done: int = 0

    def run(self) -> None:
        """Deals out tasks until the rank is gone."""
        ended, waker = os.pipe()
        os.set_blocking(waker, False)
        os.set_blocking(ended, False)
        signal.signal(signal.SIGCHLD, _pass)
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        while self.rank.is_open:
            self._begin()
            self._mind_clocks()
            peers = [self.rank, *(worker.peer for worker in self._workers.values())]
            unsent = [peer.socket for peer in peers if peer.has_unsent]
            readable: list[int | socket.socket] = [ended, *(peer.socket for peer in peers if peer.is_open)]
            patience_s, since = self._patience_s(), time.monotonic()
            select.select(readable, unsent, [], patience_s)
            if patience_s is not None:
                self._leave_out(time.monotonic() - since - patience_s)
            with suppress(BlockingIOError):
                os.read(ended, 4096)
            for peer in peers:
                if peer.has_unsent:
                    peer.flush()
            self.waiting += self.rank.receive()
            for worker in list(self._workers.values()):
                self._hear(worker)
            self._bury()
            self._end_strays()
        for worker in list(self._workers.values()):
            self._kill(worker)
        until = time.monotonic() + KILL_S
        while self._end_strays() and time.monotonic() < until:
            pass

    def _begin(self) -> None:
        """Gives waiting tasks to workers that have none."""
        while self.waiting:
            idle = next((worker for worker in self._workers.values() if worker.task is None and worker.peer.is_open), None)
            if idle is None:
                if len(self._workers) - min(self._slow(), MOST_SLOW) >= self.limit:
                    return
                idle = self._fork()
            idle.begin(self.waiting.popleft())

    def _slow(self) -> int:
        return sum(worker.is_slow for worker in self._workers.values())

    def _others_wait(self) -> bool:
        """Whether slow tasks are to make room: another task waits, and another worker may start."""
        return bool(self.waiting) and self._slow() < self.limit + MOST_SLOW

    def _fork(self) -> _Worker:
        ours, theirs = socket.socketpair()
        dies = dies_with_parent()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            _work(dies, theirs, [ours, self.rank.socket, *(worker.peer.socket for worker in self._workers.values())], self.score)
        theirs.close()
        self._workers[pid] = _Worker(pid, Peer(ours))
        return self._workers[pid]

    def _patience_s(self) -> float | None:
        """Seconds until the clocks must be looked at again, at most 1; None if there are no workers."""
        if not self._workers:
            return None
        now, soonest = time.monotonic(), float("inf")
        for worker in self._workers.values():
            if worker.task and worker.still_since is None:
                soonest = min(soonest, worker.began + worker.task.seconds)
                if self._others_wait():
                    soonest = min(soonest, worker.began + max(self._slow_s(), worker.look_s))
        return min(max(soonest - now, 0.0), 1.0)  # strays are looked for too

    def _leave_out(self, late_s: float) -> None:
        """Leaves out of the workers' clocks the seconds in which this process stood still, and they too: the job was suspended."""
        for worker in self._workers.values():
            if worker.still_since is None:
                worker.began += max(late_s, 0.0)

    def _slow_s(self) -> float:
        return max(SLOW_S, SLOW_TIMES * self._mean_s) if self._done else float("inf")

    def _hear(self, worker: _Worker) -> None:
        """Passes a worker's answer on."""
        for answer in worker.peer.receive(LARGEST_ANSWER):
            if worker.task is None or answer.number != worker.task.number:
                worker.peer.is_open = False  # it says what it was not asked
                break
            worker.go_on()
            self._done += 1
            self._mean_s += (time.monotonic() - worker.began - self._mean_s) / self._done
            worker.task, worker.is_slow = None, False
            self.rank.send(answer)
        if not worker.peer.is_open:
            os.kill(worker.pid, signal.SIGKILL)  # it is no longer of use; not reaped yet, so its id is its own

    def _bury(self) -> None:
        """Asks for children that have ended, and tells what becomes of their tasks."""
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                worker = self._workers.get(ended[0])
                if worker is None:
                    continue
                self._hear_last(worker)
                del self._workers[worker.pid]
                signal_group(worker.pid, signal.SIGKILL)
                worker.peer.close()
                if worker.task:
                    code = os.waitstatus_to_exitcode(ended[1])
                    how = f"was ended by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
                    if code == OUT_OF_MEMORY:
                        how = f"needed more than reward.memory_gib={self.score.setup.memory_gib}"
                    self._answer(worker.task, {"died": how})

    def _hear_last(self, worker: _Worker) -> None:
        for answer in worker.peer.receive(LARGEST_ANSWER):
            if worker.task is not None and answer.number == worker.task.number:
                worker.task = None
                self.rank.send(answer)

    def _mind_clocks(self) -> None:
        """Ends what is overdue, and has slow ones make room. Those that wait, e.g. for a server, are joined by others. Those that compute
        stand still until nothing else is to begin: then all of these go on beside each other, and together take no longer than one. Those
        whose own processes compute keep their places: they cannot be stopped, and with others beside them their own limits would hit them.
        """
        now, slow_s, others_wait = time.monotonic(), self._slow_s(), self._others_wait()
        for worker in list(self._workers.values()):
            if worker.task is None:
                continue
            took = now - worker.began
            if worker.still_since is not None:
                if not others_wait:
                    worker.go_on()
            elif took >= worker.task.seconds:
                self._hear(worker)  # it may have answered since it was looked at
                if worker.task is None:
                    continue
                self._answer(worker.task, {"timeout": worker.task.seconds})
                worker.task = None
                self._kill(worker)
            elif others_wait and took >= max(slow_s, worker.look_s):
                worker.look_s = 2 * took
                if worker.computed_s() >= slow_s:
                    worker.is_slow = True
                    worker.stand_still(now)
                elif worker.computed_s() + worker.children_s() < took / 2:
                    worker.is_slow = True

    def _kill(self, worker: _Worker) -> None:
        """Kills a worker with its process group; children of its that survive come up to this process as strays."""
        del self._workers[worker.pid]
        signal_group(worker.pid, signal.SIGKILL)
        with suppress(ProcessLookupError):
            os.kill(worker.pid, signal.SIGKILL)
        worker.peer.close()

    def _answer(self, task: Frame, said: dict[str, Any]) -> None:
        self.rank.send(Frame(task.number, 0.0, json.dumps(said).encode()))

    def _end_strays(self) -> bool:
        """Ends what has lost its parent among a worker's processes, and so came up to this one. Returns whether some are left: those that
        wait for a device take longer.
        """
        until = time.monotonic() + TICK_S
        while strays := _children() - self._workers.keys() - self.kept:
            for pid in strays:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if time.monotonic() > until:
                return True
            time.sleep(0.001)
            for pid in strays:
                with suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
        return False


def _processor_s(process: psutil.Process) -> tuple[float, float]:
    """Processor time that a process has taken, and its children that have ended, seconds; 0 if it is gone."""
    with suppress(psutil.Error):
        times = process.cpu_times()
        return times.user + times.system, times.children_user + times.children_system
    return 0.0, 0.0


def _children() -> set[int]:
    """Children of this process, those that have ended included."""
    text = Path(f"/proc/self/task/{os.getpid()}/children")
    if text.exists():
        return {int(pid) for pid in text.read_text(encoding="ascii").split()}
    return {child.pid for child in psutil.Process().children()}


def _work(dies: Any, end: socket.socket, others: list[socket.socket], score: Scoring) -> NoReturn:
    """Runs a new worker: sets up its process, then scores tasks until ``end`` is closed."""
    try:
        dies()
        os.setsid()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for other in others:
            other.close()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with suppress(OSError):  # where memory is short, it is a worker that goes
            Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
        score.bind()
        serve(end, score)
    except MemoryError:
        os._exit(OUT_OF_MEMORY)
    except BaseException:  # a thread of the reward's may raise in here too
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _pass(number: int, frame: Any) -> None:
    """Does nothing: the rank acts on the job's signals. They are not ignored, as a worker's children would inherit that."""


def build(setup: Setup) -> Scoring:
    """Loads the plugins, and makes their rewards ready to be copied."""
    registry = load_plugins(setup.plugins)
    rewards = {name: registry.build_reward(*said) for name, said in setup.rewards.items()}
    for name, reward in rewards.items():
        prepare(name, reward)
    threads = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    if threads:
        raise PluginError(
            f"reward={', '.join(rewards)}: threads run once plugins are loaded ({', '.join(threads)}): workers are copies of the process, "
            'and have none of them. Start them in the first call, or declare RewardSpec(..., scope="rank").'
        )
    return Scoring(rewards, {name: reward_parts.answer_reader(registry.rewards, *said) for name, said in setup.rewards.items()}, setup)


def main() -> None:
    """Runs this process."""
    end = socket.socket(fileno=int(sys.argv[1]))
    end.set_inheritable(False)
    rank = Peer(end)
    for number in (*STOP_SIGNALS, signal.SIGINT, END_SIGNAL):
        signal.signal(number, _pass)
    before = _children()
    children_end_with_this_process()
    kept = frozenset(_children() - before)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    while not (frames := rank.receive()) and rank.is_open:
        rank.wait()
    if not frames:
        return
    import numpy  # noqa: F401  its generator is seeded for each task, from the first on

    setup: Setup = pickle.loads(frames[0].payload)
    said: dict[str, Any] = {"ready": os.getpid()}
    try:
        score = build(setup)
    except BaseException as error:  # foreign code
        text = str(error) if isinstance(error, RlbatchError) else f"reward host: {type(error).__name__}: {error}"
        said = {"message": text, "traceback": traceback.format_exc()}
    rank.send_all(Frame(SETUP, 0.0, json.dumps(said).encode()))
    if "ready" in said:
        RewardHost(rank, score, setup.workers, kept, deque(frames[1:])).run()
    os._exit(0)  # no thread or exit handler of a plugin's holds it up; what it started ends with it


if __name__ == "__main__":
    main()
