"""Signals that ask a rank to stop: noticed, told apart, and able to interrupt."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlbatch.launch.ranks.children import END_SIGNAL
from rlbatch.launch.records.failures import StoppedBySignal
from rlbatch.launch.shutdown import signals
from rlbatch.launch.shutdown.signals import KILL_WAIT_S, STOP_SIGNALS, Interrupted, StopNotice, find_ending
from tests.launch.scontrol import CANCELLED, PREEMPTED, REQUEUED, TIME_LIMIT, fake_slurm, job
from tests.launch.watched import wait_for
from tests.stopwatch import Stopwatch


@pytest.fixture
def notice() -> Iterator[StopNotice]:
    """Installed in this process, for the test."""
    numbers = (*STOP_SIGNALS, signal.SIGINT, END_SIGNAL)
    before = {number: signal.getsignal(number) for number in numbers}
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # `nohup make test` ignores it
    notice = StopNotice()
    notice.install()
    yield notice
    signal.set_wakeup_fd(-1)
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_rank_that_starts_ends_at_once(number: signal.Signals, notice: StopNotice) -> None:
    """There is nothing to save yet: exit code 128 + signal, and the notice is kept, since the job may be queued again."""
    with pytest.raises(StoppedBySignal) as ended:
        os.kill(os.getpid(), number)
    assert ended.value.code == 128 + number
    assert (notice.number, notice.is_set) == (number, True)
    os.kill(os.getpid(), signal.SIGTERM)  # srun sends it once another rank has ended: what unwinds is left alone
    assert notice.number == number


@pytest.mark.parametrize("number", [signal.SIGINT, END_SIGNAL])
def test_ctrl_c_always_ends_at_once(number: signal.Signals, notice: StopNotice) -> None:
    """Also later, and it is no request to stop."""
    notice.started()
    with pytest.raises(StoppedBySignal):
        os.kill(os.getpid(), number)
    assert not notice.is_set


def test_nohup() -> None:
    """A hang-up that is ignored stays so, in the launcher and in its ranks."""
    code = (
        "import os, signal\n"
        "from rlbatch.launch.shutdown.signals import StopNotice, received_signals\n"
        "with received_signals() as received:\n"
        "    os.kill(os.getpid(), signal.SIGHUP)\n"
        "notice = StopNotice()\n"
        "notice.install()\n"
        "os.kill(os.getpid(), signal.SIGHUP)\n"
        "print(received, notice.is_set)\n"
    )
    done = subprocess.run(["nohup", sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[] False\n"


def test_the_first_signal_counts(notice: StopNotice) -> None:
    """Slurm sends SIGTERM after the signal that a job asked for; that is not another reason."""
    notice.started()
    os.kill(os.getpid(), signal.SIGUSR2)
    os.kill(os.getpid(), signal.SIGTERM)
    assert notice.wait(0)
    assert notice.number == signal.SIGUSR2
    assert 0 <= time.time() - notice.time < 60


def test_a_thread_hears_of_a_signal_while_the_main_thread_is_in_c_code() -> None:
    """No Python handler runs then, as in a collective: the thread is woken all the same."""
    program = """
import ctypes, os, signal, threading, time
from rlbatch.launch.shutdown.signals import StopNotice
notice = StopNotice(); notice.install(); notice.started()
def hear():
    print("heard", notice.wait(60), notice.number, flush=True)
    os._exit(0)
threading.Thread(target=hear).start()
threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGUSR1)).start()
lock = ctypes.create_string_buffer(64)
ctypes.CDLL(None).pthread_mutex_lock(lock)  # a mutex of zeros is free: taken here, and waited for below, whatever signals come
ctypes.CDLL(None).pthread_mutex_lock(lock)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout == f"heard True {int(signal.SIGUSR1)}\n", done.stderr


def test_an_interruption_ends_a_long_call(notice: StopNotice) -> None:
    """Only inside of the block, at once and once; later blocks do not begin."""
    notice.started()
    watch = Stopwatch()
    threading.Timer(0.2, notice.interrupt).start()
    with pytest.raises(Interrupted), notice.interruptible():
        time.sleep(60)
    watch.assert_within(30)
    os.kill(os.getpid(), signal.SIGTERM)  # outside: nothing happens
    with pytest.raises(Interrupted), notice.interruptible():
        raise AssertionError("it began")


def test_an_interruption_between_blocks_waits_for_the_next(notice: StopNotice) -> None:
    """What is not interruptible is not interrupted."""
    notice.started()
    with notice.interruptible():
        pass
    notice.interrupt()
    time.sleep(0.05)
    with pytest.raises(Interrupted), notice.interruptible():
        raise AssertionError("it began")


def test_a_foreign_handler_is_replaced(notice: StopNotice) -> None:
    """submitit installs its own before it calls a task: installing again wins."""
    notice.started()
    signal.signal(signal.SIGUSR2, lambda number, frame: sys.exit(3))
    notice.install()
    os.kill(os.getpid(), signal.SIGUSR2)
    assert notice.number == signal.SIGUSR2


NOW = 1400.0
ENDINGS = [
    (signal.SIGUSR2, {}, "SIGUSR2 600 s before the time limit", 2000, False),
    (signal.SIGUSR2, PREEMPTED, "preempted (SIGUSR2)", 1460, False),
    (signal.SIGTERM, PREEMPTED, "preempted (SIGTERM)", 1460, False),
    (signal.SIGTERM, REQUEUED, "queued again by Slurm (SIGTERM)", NOW + 12, False),
    (signal.SIGTERM, TIME_LIMIT, "time limit (SIGTERM)", NOW + 12, False),
    (signal.SIGTERM, CANCELLED, "cancelled (SIGTERM)", NOW + 12, True),
    (signal.SIGTERM, {}, "cancelled (SIGTERM)", NOW + 12, True),
    (signal.SIGUSR1, {"end": "Unknown"}, "SIGUSR1", NOW + KILL_WAIT_S, False),
]


@pytest.mark.parametrize(("number", "record", "why", "deadline", "is_cancelled"), ENDINGS)
def test_slurm_says_what_a_signal_means(
    number: int, record: dict, why: str, deadline: float, is_cancelled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reason and end of the job, by ``scontrol show job``: the limit, the grace time of a preemption, KillWait of a cancelled job."""
    fake_slurm(tmp_path, monkeypatch).shows(**record)
    ending = find_ending(number, NOW, job(), None)
    assert (ending.why, ending.deadline, ending.is_cancelled) == (why, deadline, is_cancelled)


def test_without_slurm_the_config_says_how_long_a_notice_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``launch.notice_s``, else what Slurm and others give by default between SIGTERM and SIGKILL. Nobody asks a Slurm of another job."""
    fake_slurm(tmp_path, monkeypatch).shows()
    monkeypatch.delenv("SLURM_JOB_ID")
    assert find_ending(signal.SIGUSR1, NOW, job(), 250).deadline == NOW + 250
    ending = find_ending(signal.SIGTERM, NOW, job(), None)
    assert (ending.why, ending.deadline, ending.is_cancelled) == ("SIGTERM", NOW + KILL_WAIT_S, False)


def test_a_node_without_scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The signal itself is all that is known; nothing fails."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_ending(signal.SIGUSR2, NOW, job(), 60).deadline == NOW + 60


def test_a_main_thread_that_gets_to_a_signal_leaves_itself(notice: StopNotice, monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread does it for it, nor for one that has started (tests/launch/membership/test_watchdog.py has one that waits in C code)."""
    monkeypatch.setattr(signals, "STUCK_S", 0.1)
    monkeypatch.setattr(signals, "LOOK_S", 0.05)
    left: list[int] = []
    notice.end_start(left.append)
    with pytest.raises(StoppedBySignal):
        os.kill(os.getpid(), signal.SIGTERM)
    wait_for(lambda: not [thread for thread in threading.enumerate() if thread.name == "rlbatch-start"])
    assert left == []
    other = StopNotice()
    other.end_start(left.append)
    other.started()
    wait_for(lambda: not [thread for thread in threading.enumerate() if thread.name == "rlbatch-start"])
    assert left == []
