"""What other tests rest on: that they see memory which is left, and lateness, and only those."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import leftovers, stopwatch
from tests.leftovers import FOLDER, no_memory_left, shared_by
from tests.stopwatch import Stopwatch


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A name in /dev/shm that is not there, of an engine."""
    monkeypatch.setattr(leftovers, "GONE_S", 0.2)
    path = FOLDER / f"vllm_test-promises-{os.getpid()}"
    yield path
    path.unlink(missing_ok=True)


@pytest.fixture
def nameless(memory: Path) -> Iterator[Path]:
    """One that says nothing of whose it is."""
    path = FOLDER / f"test-promises-{os.getpid()}"
    yield path
    path.unlink(missing_ok=True)


def test_memory_that_is_left_is_seen(memory: Path) -> None:
    """A name that nobody uses fails the test in which it appeared, and no later one."""
    with pytest.raises(AssertionError, match=memory.name), no_memory_left():
        memory.write_bytes(b"left")
    with no_memory_left():
        pass


def test_memory_of_a_test_s_process_is_seen_whatever_its_name(nameless: Path) -> None:
    """Of one that a process had mapped that the test started, and that another one started for it."""
    mapping = f"import mmap\nfile = open({str(nameless)!r}, 'xb+')\nfile.truncate(9)\nkept = mmap.mmap(file.fileno(), 9)\n"
    code = mapping + "print(flush=True)\ninput()"
    started = [sys.executable, "-c", f"import subprocess, sys; subprocess.run([sys.executable, '-c', {code!r}])"]
    with pytest.raises(AssertionError, match=nameless.name), no_memory_left():
        process = subprocess.Popen(started, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(1.0)  # engines live longer
        process.communicate("")


def test_memory_of_other_programs_is_theirs(nameless: Path) -> None:
    """A name that no engine gives, and that no process of the test had mapped."""
    with no_memory_left():
        nameless.write_bytes(b"of a program beside the test")


def test_memory_in_use_is_not_left(memory: Path) -> None:
    """A name that a process has mapped, such as another test's engine, is that process's."""
    with no_memory_left():
        memory.write_bytes(b"used")
        with memory.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    assert memory.name in shared_by(os.getpid())
    mapped.close()


def test_only_waits_for_a_processor_are_forgiven(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten seconds are more than five, unless some process waited in six of them; a kernel that does not count waits forgives nothing."""
    pressure = tmp_path / "cpu"
    monkeypatch.setattr(stopwatch, "PRESSURE", pressure)
    monkeypatch.setattr(stopwatch, "PERIOD_S", 0.0)
    line = "some avg10=0.00 avg60=0.00 avg300=0.00 total={}\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=0\n"
    for waited_s, is_late in ((None, True), (4, True), (6, False)):
        if waited_s is not None:
            pressure.write_text(line.format(123))
        watch = Stopwatch()
        watch._started -= 10.0
        if waited_s is not None:
            pressure.write_text(line.format(123 + waited_s * 10**6))
        if is_late:
            with pytest.raises(AssertionError, match=r"10\.0 s"):
                watch.assert_within(5.0)
        else:
            watch.assert_within(5.0)
        watch.assert_within(11.0)
