"""A test's processes, and shared memory that they use or leave behind; what runs beside the test does not count."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

FOLDER = Path("/dev/shm")
GONE_S = 60.0
"""For the last process to end and for what others make at this moment to be opened; memory that is left stays for good."""
LOOK_S = 0.1
"""Between two looks at what the test's processes have mapped."""
STARTED: list[subprocess.Popen[str]] = []
"""Runs of the test, which end with it: one that a failed test left would take the processors from all tests after it."""
OURS = ("rlbatch-", "sem.rlbatch-", "vllm", "sglang")
"""How names of engines begin: what rlbatch makes them call their memory and semaphores, and their own."""


def shared_memory() -> set[str]:
    """Names in /dev/shm."""
    return set(os.listdir(FOLDER))


def shared_by(pid: int) -> set[str]:
    """Names in /dev/shm, removed ones too, of memory that a process has mapped."""
    return {line.rpartition(f"{FOLDER}/")[2].split()[0] for line in _lines(Path(f"/proc/{pid}/maps")) if f"{FOLDER}/" in line}


def abandoned(names: set[str]) -> set[str]:
    """Those that are in /dev/shm and that no process has mapped: what jobs that run beside this one use is not among them."""
    names = shared_memory() & names  # before the processes: what is made meanwhile is not looked for
    return names.difference(*(shared_by(int(entry.name)) for entry in Path("/proc").glob("[0-9]*"))) if names else names


class Appearing:
    """Names that appear in /dev/shm and that engines give, or that this process or one that it started has mapped at some time.

    Others are of programs that run beside the tests.
    """

    def __init__(self) -> None:
        self._before, self._mapped, self._over = shared_memory(), set[str](), threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def ours(self) -> set[str]:
        """Up to now."""
        names = shared_memory() - self._before
        foreign = {name for name in names if not name.startswith(OURS)} - self._mapped
        if foreign:
            with suppress(psutil.NoSuchProcess):
                for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
                    self._mapped |= foreign & shared_by(process.pid)
        return {name for name in names if name.startswith(OURS) or name in self._mapped}

    def end(self) -> None:
        """Processes are not looked at any more."""
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(LOOK_S):
            self.ours()


@contextmanager
def no_memory_left() -> Iterator[None]:
    """Fails if /dev/shm has a name afterwards that was not there before, that is an engine's or of the test's processes, and that no
    process uses.
    """
    appearing = Appearing()
    try:
        yield
        deadline = time.monotonic() + GONE_S
        while (left := abandoned(appearing.ours())) and time.monotonic() < deadline:
            time.sleep(0.05)
    finally:
        appearing.end()
    assert not left, f"left in {FOLDER}: {sorted(left)}"


def _lines(path: Path) -> list[str]:
    with suppress(OSError):
        return path.read_text(errors="replace").splitlines()
    return []


def processes_of(folder: Path) -> list[int]:
    """Living processes whose command or environment names a folder, or that such a process started with its environment."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if os.fsencode(folder) in (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes():
                found.append(int(entry.name))
    return found


def commands_of(folder: Path) -> list[str]:
    """What they are called. Some may end meanwhile."""
    return [name for pid in processes_of(folder) for name in _lines(Path(f"/proc/{pid}/comm"))]


def wait_until_gone(folder: Path) -> None:
    """Returns when none of them lives any more, or fails after a while."""
    deadline = time.monotonic() + GONE_S
    while (alive := processes_of(folder)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive, f"processes of {folder} that do not end: {alive}"


def process_called(folder: Path, word: str) -> int:
    """The one of a folder's processes, or of their children, whose command has a word. Others may come and go meanwhile."""
    for pid in processes_of(folder):
        with suppress(psutil.NoSuchProcess):
            for process in (psutil.Process(pid), *psutil.Process(pid).children()):
                with suppress(psutil.NoSuchProcess):
                    if word in " ".join(process.cmdline()):
                        return process.pid
    raise AssertionError(f"no process of {folder} is called {word}")
