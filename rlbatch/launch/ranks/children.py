"""Child processes that do not outlive their parent, not even if it is killed with SIGKILL.

Two means, because neither is enough: the kernel's parent-death signal reaches a child but not its children, and a process that waits for
the parent's end reaches all of them but must first be running.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from psutil import Process

END_SIGNAL = signal.SIGRTMIN
"""Signal that ends a rank at once, as Ctrl-C does, also before Python code of ours runs in it; nobody else sends it."""
_PR_SET_PDEATHSIG = 1
MAX_FILES = 4096
"""Files that a process may have open while it starts."""
GUARD_POLL_S = 60.0
MAX_PASSES, PASS_S = 100, 0.05
MARK_VARIABLE = "RLBATCH_CHILD_OF"
"""Variable by which children are known that left the group of an engine's host. Who starts the host sets it, to something random: the
system shows what a process was started with, and its forks with it, not what it sets later.
"""


def dies_with_parent() -> Callable[[], None]:
    """A ``preexec_fn`` for ``Popen``: the child gets SIGKILL when the thread that started it ends."""
    libc = ctypes.CDLL(None, use_errno=True)  # loaded here: between fork and exec little is safe
    parent = os.getpid()

    def preexec() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it ended before the request took effect
            os._exit(1)

    return preexec


def children_end_with_this_process() -> None:
    """Kills this process's group once this process has ended, in any way: its children, their children and so on. A child that left the
    group, to a session of its own, is known by ``MARK_VARIABLE``. (One without its variables ends with the rank, see ``guardian``.)

    Makes the process a group of its own. Call it before there are threads: the process that waits is a fork, which holds no files.
    """
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)
    mark = f"{MARK_VARIABLE}={os.environ.setdefault(MARK_VARIABLE, secrets.token_hex(8))}".encode()
    libc, parent = ctypes.CDLL(None, use_errno=True), os.getpid()
    if os.fork():
        return
    try:
        os.setsid()
        signal.pthread_sigmask(signal.SIG_SETMASK, set(signal.Signals))
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGUSR1, 0, 0, 0)
        os.closerange(0, MAX_FILES)
        while os.getppid() == parent:  # others may signal this process too, e.g. srun all of a step's
            signal.sigtimedwait({signal.SIGUSR1}, GUARD_POLL_S)
        signal_group(parent, signal.SIGKILL)
        for _ in range(MAX_PASSES):  # what was just being started is found by the next pass
            if not _kill_marked(mark):
                break
            time.sleep(PASS_S)
    finally:
        os._exit(0)


def _kill_marked(mark: bytes) -> bool:
    """Kills the other processes that were started with this variable, and returns whether there were any."""
    found = False
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(OSError):  # it is gone, or another user's
            with open(f"/proc/{name}/environ", "rb") as file:
                variables = file.read().split(b"\0")
            if mark in variables and int(name) != os.getpid():
                os.kill(int(name), signal.SIGKILL)
                found = True
    return found


def resident_bytes(processes: Iterable[Process]) -> int:
    """Bytes of resident memory that the processes have which still live."""
    import psutil  # an engine's interpreter may lack it

    found = 0
    for process in processes:
        with suppress(psutil.Error):
            found += process.memory_info().rss
    return found


def signal_group(group: int, number: int) -> None:
    """Sends a signal to a process group that may be gone."""
    with suppress(ProcessLookupError):
        os.killpg(group, number)
