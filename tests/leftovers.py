"""A test's processes, and shared memory that they use or leave behind; what runs beside the test does not count."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

FOLDER = Path("/dev/shm")
GONE_S = 60.0
"""For the last process to end and for what others make at this moment to be opened; memory that is left stays for good."""


def shared_memory() -> set[str]:
    """Names in /dev/shm."""
    return set(os.listdir(FOLDER))


def shared_by(pid: int) -> set[str]:
    """Names in /dev/shm, removed ones too, of memory that a process has mapped."""
    return {line.rpartition(f"{FOLDER}/")[2].split()[0] for line in _lines(Path(f"/proc/{pid}/maps")) if f"{FOLDER}/" in line}


def abandoned_memory(known: set[str]) -> set[str]:
    """Other names in /dev/shm of memory that no process has mapped: what jobs that run beside this one use is not among them."""
    names = shared_memory() - known  # before the processes: what is made meanwhile is not looked for
    return names.difference(*(shared_by(int(entry.name)) for entry in Path("/proc").glob("[0-9]*"))) if names else names


@contextmanager
def no_memory_left() -> Iterator[None]:
    """Fails if /dev/shm has a name afterwards that was not there before and that no process uses."""
    before = shared_memory()
    yield
    deadline = time.monotonic() + GONE_S
    while (left := abandoned_memory(before)) and time.monotonic() < deadline:
        time.sleep(0.05)
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
