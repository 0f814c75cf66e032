"""The processes above a rank: what they make of its end, of its children, and of signals."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.launch.watched import END_S, wait_for
from tests.stopwatch import Stopwatch

RANK = """
import atexit, ctypes, os, signal, subprocess, sys, threading, time
from rlbatch.launch.shutdown import guardian
from rlbatch.launch.shutdown.signals import StopNotice

guardian.CLOSING_S = guardian.EXEC_S = float(sys.argv[2])
notice = StopNotice()
notice.install()
died = lambda how, told: print(f"died: {how} {told}", flush=True)
with guardian.guarded(notice, died, lambda held: print(f"held: {held}", flush=True)):
    notice.started()
    guardian.tell(phase="training")
    print(os.getpid(), os.getppid(), flush=True)
    exec(sys.argv[1])
"""
FOREVER = "time.sleep(600)"
PATIENT, IMPATIENT = "60", "2"
"""Seconds in which a rank must end, for one that does and for one that does not."""
NO_VARIABLES = "subprocess.Popen(['setsid', '-f', 'sh', '-c', 'echo $$; exec sleep 600'], env={'PATH': os.environ['PATH']})"
FORKED_TWICE = """
if not os.fork():
    os.setsid()
    if not os.fork():
        print(os.getpid(), flush=True)
        time.sleep(600)
    os._exit(0)
"""


def start(body: str, limit_s: str = PATIENT) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", RANK, body, limit_s], stdout=subprocess.PIPE, text=True)


def finish(rank: subprocess.Popen[str]) -> tuple[int, list[str]]:
    """Exit code, and lines after the first."""
    output, _ = rank.communicate(timeout=END_S)
    return rank.returncode, output.splitlines()


def test_a_fork_that_comes_back() -> None:
    """The child of a reward's `os.fork` that returns as the rank does, or raises there, goes no further: two would train, and write."""
    for after in ("", "; child or 1 / 0"):
        code, lines = finish(start(f"with notice.interruptible():\n    child = os.fork(){after}\nprint('went on')\nos.wait()"))
        assert (code, lines[1:]) == (0, ["went on"])


def test_killed_with_what_started_it(tmp_path: Path) -> None:
    """The upper process and its parent at once, as a launcher is killed: the lower one ends the rank, and says so."""
    said = tmp_path / "said"
    shell = f"{sys.executable} -c '{RANK}' '{FOREVER}' {PATIENT} > {said} & echo $!; exec sleep 600"
    with subprocess.Popen(["sh", "-c", shell], stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout
        upper = int(launcher.stdout.readline())
        wait_for(lambda: said.exists() and said.read_text().endswith("\n"))
        rank = int(said.read_text().split()[0])
        launcher.kill()
        launcher.wait()
        os.kill(upper, signal.SIGKILL)
    wait_for(lambda: not psutil.pid_exists(rank))
    wait_for(lambda: said.read_text().splitlines()[1:] == ["died: what started it was killed {'phase': 'training'}"])


@pytest.mark.parametrize(
    ("body", "code", "how"),
    [
        ("os._exit(0)", 1, "exit code 0: os._exit, or exit() in C code"),
        ("os._exit(75)", 1, "exit code 75: "),
        ("os._exit(7)", 7, "exit code 7: "),
        ("ctypes.CDLL(None).exit(0)", 1, "exit code 0: "),
        ("threading.Thread(target=os._exit, args=(0,)).start(); " + FOREVER, 1, "exit code 0: "),
        ("os.execv('/bin/true', ['true'])", 1, "exit code 0: "),
        ("os.execv('/bin/sleep', ['sleep', '600'])", 1, "it has become another program (exec), or closed all its files"),
        ("os.abort()", -signal.SIGABRT, "killed by SIGABRT"),
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, "killed by SIGKILL, out of memory?"),
    ],
)
def test_an_end_that_nobody_announced(body: str, code: int, how: str) -> None:
    """It is told with what the rank said before, and is no success, whatever its exit code."""
    ended, lines = finish(start(body, IMPATIENT if "sleep'" in body else PATIENT))
    assert ended == code
    assert lines[1].startswith(f"died: {how}")
    assert lines[1].endswith("{'phase': 'training'}")


OUT_OF_MEMORY = RANK.replace(
    "with guardian",
    "kills = iter([3, 4])\nguardian.oom_kills, guardian.none_left = lambda: next(kills), lambda: 'of 1.5 GiB none was left'\nwith guardian",
)


def test_a_rank_for_which_there_was_no_memory() -> None:
    """The system says that it killed one while this one ran; what it had at most, and what it had started, is told."""
    body = "child = subprocess.Popen(['sleep', '600']); block = b'1' * 2**28; os.kill(os.getpid(), signal.SIGKILL)"
    code, lines = finish(subprocess.Popen([sys.executable, "-c", OUT_OF_MEMORY, body, PATIENT], stdout=subprocess.PIPE, text=True))
    how, _, told = lines[1].partition(" {")
    assert (code, how) == (-signal.SIGKILL, "died: killed by the system: of 1.5 GiB none was left")
    facts = ast.literal_eval("{" + told)
    assert facts["phase"] == "training"
    assert 2**28 < facts["most_bytes"] < 2**29
    assert 0 < facts["other_bytes"] < 2**24


# The upper process, which leads no session, tells nothing.
TOLD_FIRST = RANK.replace(
    "with guardian",
    """
told = threading.Event()
died = lambda how, facts: (print(f"died: {how}", flush=True), told.set())
guardian._kill_descendants = lambda: print("descendants", told.wait(60 if os.getsid(0) == os.getpid() else 0), flush=True)
with guardian""",
)


def test_a_death_is_told_before_all_descendants_are_found() -> None:
    """Rank 0 decides after a moment what to say of it, and where there are many processes looking for descendants takes longer."""
    rank = subprocess.Popen([sys.executable, "-c", TOLD_FIRST, "os._exit(7)", PATIENT], stdout=subprocess.PIPE, text=True)
    assert finish(rank)[1][1:3] == ["died: exit code 7: os._exit, or exit() in C code", "descendants True"]


@pytest.mark.parametrize(
    ("body", "code"), [("pass", 0), ("sys.exit()", 0), ("sys.exit(75)", 75), ("guardian.end(143)", 143), ("sys.exit('words')", 1)]
)
def test_an_end_as_it_should_be(body: str, code: int) -> None:
    """The exit code is the rank's, and nothing is told."""
    ended, lines = finish(start(body))
    assert (ended, lines[1:]) == (code, [])


@pytest.mark.parametrize(
    ("body", "held"),
    [
        ("threading.Thread(target=time.sleep, args=(600,), name='stuck').start()", "its threads stuck"),
        ("atexit.register(time.sleep, 600)", "what its code does at exit"),
    ],
)
@pytest.mark.parametrize("code", [0, 75])
def test_what_holds_a_process_at_its_end(body: str, held: str, code: int) -> None:
    """It ends all the same, with the exit code that it has said, and a line names what held it."""
    ended, lines = finish(start(f"{body}; sys.exit({code})", IMPATIENT))
    assert (ended, lines[1:]) == (code, [f"held: {held}"])


def test_a_process_that_takes_its_time_to_free_memory() -> None:
    """Once threads and exit handlers are done there is nothing to blame, also on a machine that is busy."""
    ended, lines = finish(start("class Slow:\n    def __del__(self, sleep=time.sleep): sleep(3)\nsys.slow = Slow()", IMPATIENT))
    assert (ended, lines[1:]) == (0, [])


@pytest.mark.parametrize("child", [NO_VARIABLES, FORKED_TWICE])
@pytest.mark.parametrize("end", ["0", "rank", "lower", "upper"])
def test_all_that_a_rank_started_ends_with_it(child: str, end: str) -> None:
    """Also what left group, session and environment behind, and whichever of the three processes is killed."""
    body = f"{child}\ninput() if {end == '0'} else {FOREVER}"
    rank = subprocess.Popen([sys.executable, "-c", RANK, body, PATIENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert rank.stdin
    assert rank.stdout
    lowest, lower = map(int, rank.stdout.readline().split())
    orphan = psutil.Process(int(rank.stdout.readline()))
    if end == "0":
        rank.stdin.write("\n")
        rank.stdin.flush()
    else:
        os.kill({"rank": lowest, "lower": lower, "upper": rank.pid}[end], signal.SIGKILL)
    code, _ = finish(rank)
    assert code == (0 if end == "0" else -signal.SIGKILL)
    wait_for(lambda: not any(map(alive, (lowest, lower, orphan.pid))))
    assert not any(map(alive, (lowest, lower, orphan.pid)))


def alive(pid: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    return False


def test_orphans_that_end_leave_nothing(tmp_path: Path) -> None:
    """Those that came up to the guardian are no zombies: a long run may have thousands."""
    rank = start(f"[subprocess.run(['setsid', '-f', 'true']) for _ in range(3)]\nopen({str(tmp_path / 'done')!r}, 'w')\n{FOREVER}")
    assert rank.stdout
    _, lower = map(int, rank.stdout.readline().split())
    wait_for((tmp_path / "done").exists)
    wait_for(lambda: len(psutil.Process(lower).children()) == 1)
    assert len(psutil.Process(lower).children()) == 1
    rank.send_signal(signal.SIGINT)
    finish(rank)


FOREIGN = {
    "handlers": "[signal.signal(number, signal.SIG_IGN) for number in (signal.SIGTERM, signal.SIGUSR1)]",
    "default": "signal.signal(signal.SIGTERM, lambda *_: None)",
    "mask": "signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())",
    "wakeup": "signal.set_wakeup_fd(-1)",
    "asyncio": "import asyncio; asyncio.run(asyncio.sleep(0))",
}


@pytest.mark.parametrize("foreign", FOREIGN.values(), ids=FOREIGN.keys())
def test_a_signal_to_a_rank_whose_code_took_it(foreign: str) -> None:
    """Whoever waits for it on a thread hears of it while that code runs; afterwards the rank's own handlers are in place again."""
    body = f"""
{foreign}
print("ready", flush=True)
with notice.interruptible():
    print(notice.wait({END_S}), notice.number, flush=True)
blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
print(signal.getsignal(signal.SIGTERM) == notice._receive, signal.SIGTERM in blocked, flush=True)
"""
    rank = start(body)
    assert rank.stdout
    rank.stdout.readline()
    assert rank.stdout.readline() == "ready\n"
    rank.send_signal(signal.SIGTERM)
    assert finish(rank) == (0, [f"True {int(signal.SIGTERM)}", "True False"])


def test_a_guardian_that_is_stopped() -> None:
    """Somebody takes it for the rank: the rank's end is not held up."""
    rank = start("input = sys.stdin.readline; time.sleep(1)")
    assert rank.stdout
    _, lower = map(int, rank.stdout.readline().split())
    watch = Stopwatch()
    os.kill(lower, signal.SIGSTOP)
    time.sleep(0.1)
    rank.send_signal(signal.SIGSTOP)
    assert finish(rank) == (0, [])
    watch.assert_within(30)
