"""Processes that tests start as daemons: alive or not, ended for certain, and none left behind."""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NoReturn

import pytest

POLL_S = 0.1
PACKAGES = "apt-get install --no-install-recommends slurm-wlm munge openssh-server iproute2"


def require(*programs: str) -> None:
    """Skips the test where it cannot run, saying what it needs; with ``CI=true`` fails it instead."""
    missing = [program for program in programs if shutil.which(program) is None]
    problems = [f"not installed: {', '.join(missing)} (Debian: {PACKAGES})"] if missing else []
    if os.geteuid() != 0:
        problems.append("needs root: its daemons act for other users")
    elif not missing and subprocess.run(["unshare", "--uts", "--net", "true"], capture_output=True).returncode:
        problems.append("needs the right to make namespaces: a machine of its own, or a privileged container")
    if problems:
        cannot_run("; ".join(problems))


def cannot_run(why: str) -> NoReturn:
    """Skips the test, because this machine lacks what it runs on (root, a Debian package, an MPI, vLLM), which ``why`` names.

    With ``CI=true`` it fails instead: there everything is installed, so that nothing is skipped.
    """
    if os.environ.get("CI") == "true":
        pytest.fail(why)
    pytest.skip(why)


def wait_until(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    """Polls until the condition holds.

    Raises:
        TimeoutError: it did not hold in time; says what was waited for.
    """
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {timeout_s:g} s: {what}")
        time.sleep(POLL_S)


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that ended and that nobody waits for (a zombie) does not."""
    with suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def stop(pids: Iterable[int], grace_s: float = 8.0) -> None:
    """Ends processes: asked first, then forced."""
    pids = [pid for pid in pids if is_alive(pid)]
    for number, seconds in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 5.0)):
        for pid in filter(is_alive, pids):
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        deadline = time.monotonic() + seconds
        while any(map(is_alive, pids)) and time.monotonic() < deadline:
            time.sleep(POLL_S)


def free_ports(count: int) -> int:
    """The first of so many free TCP ports in a row, below the range that the system hands out."""
    while True:
        first = random.SystemRandom().randrange(10_000, 20_000 - count)
        with ExitStack() as stack:
            try:
                for port in range(first, first + count):
                    stack.enter_context(socket.socket()).bind(("", port))
            except OSError:
                continue
            return first


def pids_of(files: Iterable[Path]) -> list[int]:
    """Process ids in those of the pidfiles that exist."""
    return [int(text) for file in files if file.exists() and (text := file.read_text().strip())]


def with_variable(name: str, value: str) -> list[int]:
    """Living processes, other than this one, that were started with this environment variable."""
    wanted = f"{name}={value}".encode()
    pids = (int(folder.name) for folder in Path("/proc").glob("[0-9]*"))
    return [pid for pid in pids if pid != os.getpid() and is_alive(pid) and wanted in _environment(pid)]


def has_variable(pid: int, name: str) -> bool:
    """Whether a process was started with an environment variable."""
    return any(entry.startswith(f"{name}=".encode()) for entry in _environment(pid))


def _environment(pid: int) -> list[bytes]:
    with suppress(OSError):
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return []


@contextmanager
def public_folder(prefix: str) -> Iterator[Path]:
    """A folder in /tmp that every user may enter, as daemons demand of their sockets and keys."""
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir="/tmp"))
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
