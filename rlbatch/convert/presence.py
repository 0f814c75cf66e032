"""Which processes of a conversion live: each holds a lock on a file of its own, which its kernel lets go of however it ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from rlbatch.api import RlbatchError

BEAT_S = 2.0
"""Seconds between signs of life."""
UNLOCKED_S = 30.0
"""Of silence that must come on top for a process of another machine: some network file systems keep locks to a machine."""
SHOW_S = 0.1
"""Seconds between looks for the folder."""
_NO_LOCK = "unlocked"


@dataclass
class _Seen:
    """What was last seen of a process: the time of its last sign by its own clock, and when that changed by ours."""

    sign: int
    since: float


class Presence:
    """This process's place in a folder that all see, and a look at the others'.

    As a context: a regular end, or an error of ours, removes the place; any other end leaves it behind without its lock.

    Args:
        folder: Where all meet; it need not be there yet.
        rank: This process's.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._rank = folder, rank
        self._machine = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        self._file = -1
        self._seen: dict[int, _Seen] = {}
        self._ended = threading.Event()
        self._beating = threading.Thread(target=self._beat, name="rlbatch-presence", daemon=True)

    def __enter__(self) -> Presence:
        """Takes the place, as soon as there is the folder."""
        with contextlib.suppress(OSError):
            self._show()
        self._beating.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None) -> None:
        """Leaves it."""
        self._ended.set()
        self._beating.join()
        with contextlib.suppress(OSError):
            if (error is None or isinstance(error, RlbatchError)) and self._is_mine():
                self._path(self._rank).unlink()
        if self._file >= 0:
            os.close(self._file)

    def clear(self) -> None:
        """Removes what is in the folder, which an earlier start left, but for the places of processes that live."""
        for old in self._folder.iterdir():
            rank = old.name.removeprefix("alive.")
            if not (rank.isdecimal() and self.is_there(int(rank))):
                old.unlink(missing_ok=True)

    def is_there(self, rank: int) -> bool:
        """Whether a process has taken its place, and lives."""
        return self._path(rank).exists() and not self.is_gone(rank)

    def is_gone(self, rank: int) -> bool:
        """Whether a process had its place and ended without leaving it."""
        try:
            file = os.open(self._path(rank), os.O_RDONLY)
        except OSError:
            return False
        try:
            machine, _, rest = os.read(file, 4096).decode().partition(" ")
            is_silent = self._silent_s(rank, os.fstat(file).st_mtime_ns) > UNLOCKED_S
            if rest.endswith(_NO_LOCK) or not (is_silent or machine == self._machine):
                return False
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:  # it is held, or cannot be tried
            return False
        finally:
            os.close(file)
        return True

    def silent_s(self, rank: int) -> float:
        """Seconds since the last sign of life of a process, or the first question for it."""
        with contextlib.suppress(OSError):
            return self._silent_s(rank, self._path(rank).stat().st_mtime_ns)
        return self._silent_s(rank, 0)

    def host(self, rank: int) -> str:
        """A process's machine and id, for messages; empty: not known."""
        with contextlib.suppress(OSError, IndexError):
            _, host, pid = self._path(rank).read_text(encoding="utf-8").split()[:3]
            return f"host {host}, process id {pid}"
        return ""

    def _silent_s(self, rank: int, sign: int) -> float:
        now = time.monotonic()
        if rank not in self._seen or self._seen[rank].sign != sign:
            self._seen[rank] = _Seen(sign, now)
        return now - self._seen[rank].since

    def _path(self, rank: int) -> Path:
        return self._folder / f"alive.{rank}"

    def _is_mine(self) -> bool:
        try:
            return os.path.samestat(os.fstat(self._file), self._path(self._rank).stat())
        except OSError:
            return False

    def _show(self) -> None:
        """Makes the file: it is locked before it has its name."""
        draft = self._folder / f"coming.{self._rank}.{socket.gethostname()}.{os.getpid()}"
        file = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            lock = "locked"
        except OSError:
            lock = _NO_LOCK
        os.write(file, f"{self._machine} {socket.gethostname()} {os.getpid()} {lock}".encode())
        os.replace(draft, self._path(self._rank))
        before, self._file = self._file, file
        if before >= 0:
            os.close(before)

    def _beat(self) -> None:
        """The thread. Signs come also while the main thread reads a large tensor; a first process that started later cleared the folder."""
        while not self._ended.wait(BEAT_S if self._file >= 0 else SHOW_S):
            with contextlib.suppress(OSError):
                if self._is_mine():
                    os.utime(self._file)
                else:
                    self._show()
