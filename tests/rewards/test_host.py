"""When a worker makes room for others, and its clock; what a reward host does as a whole: test_scorer.py."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress

import psutil
import pytest

from rlbatch.launch.ranks.children import signal_group
from rlbatch.rewards.frames import Frame, Peer, Setup
from rlbatch.rewards.host import SLOW_S, RewardHost, _Worker
from rlbatch.rewards.worker import Scoring

TASK = Frame(1, 600.0, b"")
SPIN = "while True: pass"
WAIT = "import time; time.sleep(600)"
CHILD = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SPIN!r}])"
Work = Callable[[str], tuple[RewardHost, _Worker]]


@pytest.fixture
def work() -> Iterator[Work]:
    """A host with a worker that is at a task, and does what a program says."""
    started: list[tuple[subprocess.Popen[bytes], list[socket.socket]]] = []

    def begun(program: str) -> tuple[RewardHost, _Worker]:
        process = subprocess.Popen([sys.executable, "-c", program], start_new_session=True)
        ends = [*socket.socketpair(), *socket.socketpair()]
        started.append((process, ends))
        host = RewardHost(Peer(ends[0]), Scoring({}, {}, Setup((), {}, 0, 1, None)), 1, frozenset(), deque(), _done=1)
        worker = host._workers[process.pid] = _Worker(process.pid, Peer(ends[2]))
        worker.begin(TASK)
        return host, worker

    yield begun
    for process, ends in started:
        signal_group(process.pid, 9)
        process.wait()
        for end in ends:
            end.close()


def is_stopped(worker: _Worker) -> bool:
    return bool(psutil.Process(worker.pid).status() == psutil.STATUS_STOPPED)


def until(is_so: Callable[[], bool]) -> None:
    last = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < last
        time.sleep(0.01)


def test_what_computes_stands_still_while_others_wait(work: Work) -> None:
    """Not before there is somebody else; then until nobody waits any more. Meanwhile its clock stands too."""
    host, worker = work(SPIN)
    until(lambda: worker.computed_s() >= SLOW_S and time.monotonic() >= worker.began + SLOW_S)
    host._mind_clocks()
    assert (worker.is_slow, is_stopped(worker)) == (False, False)
    host.waiting.append(TASK)
    host._mind_clocks()
    assert worker.is_slow
    until(lambda: is_stopped(worker))
    began = worker.began
    time.sleep(0.2)
    host._mind_clocks()
    assert is_stopped(worker)
    host.waiting.clear()
    host._mind_clocks()
    assert worker.began - began >= 0.2
    until(lambda: not is_stopped(worker))


@pytest.mark.parametrize(("program", "makes_room"), [(WAIT, True), (CHILD, False)], ids=["waits", "its child computes"])
def test_what_does_not_compute_goes_on(work: Work, program: str, makes_room: bool) -> None:
    """One that waits is joined by others, one whose own processes compute is not."""
    host, worker = work(program)
    until(lambda: makes_room or worker.children_s() >= 2 * SLOW_S)
    worker.began = time.monotonic() - (60.0 if makes_room else 2 * SLOW_S)  # as on a machine with nothing else to do
    host._mean_s = SLOW_S / 20 * 1.5
    host.waiting.append(TASK)
    host._mind_clocks()
    assert (worker.is_slow, is_stopped(worker)) == (makes_room, False)


def test_an_answer_that_is_overdue_is_told(work: Work) -> None:
    """Its worker is ended."""
    host, worker = work(SPIN)
    worker.began -= TASK.seconds
    host._mind_clocks()
    assert host._workers == {}
    with suppress(psutil.NoSuchProcess):
        until(lambda: psutil.Process(worker.pid).status() == psutil.STATUS_ZOMBIE)


def test_an_answer_that_came_in_time_counts(work: Work) -> None:
    """Also where the host gets to it after the deadline; and what stood still with the host has its time left."""
    host, worker = work(WAIT)
    ours, theirs = socket.socketpair()
    worker.peer, far = Peer(ours), Peer(theirs)
    worker.began -= TASK.seconds
    host._leave_out(60.0)
    host._mind_clocks()
    assert worker.task is TASK
    worker.began -= 60.0
    far.send(Frame(TASK.number, 0.0, b"{}"))
    host._mind_clocks()
    assert worker.task is None
    assert list(host._workers.values()) == [worker]
    far.close()
    worker.peer.close()
