"""Output that may find nobody who reads it: a closed pipe, a terminal that is gone or stopped, a full disk behind it.

None of them may end or hold up what a process does. What cannot be written goes to a file in the run folder, where there is one.
"""

from __future__ import annotations

import io
import os
import select
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

TERMINAL_VARIABLE = "RLBATCH_TERMINAL_FD"
"""File descriptor of the user's terminal, where the launcher sends a rank's own output elsewhere."""
PATIENCE_S = 5.0
"""Longest time that a write waits for a reader; once one waited in vain, later ones do not until there is room again."""
PIECE = select.PIPE_BUF
"""Bytes that a pipe with room takes at once."""
ESCAPE = b"\x1b"
"""Begins what only a terminal understands, such as the drawing of a progress bar."""
LOGS = "logs"
MERGED_LOG = "logs/job.log"
"""Log of a batch job, in its run folder: the batch script's output, with rank 0's and the first error."""


class ResilientStream(io.RawIOBase):
    """A file descriptor that can always be written to.

    Attributes:
        log: File that gets what the descriptor does not take; None: that is dropped.
        lost: Why the descriptor takes nothing any more; None: it does. From then on the descriptor is the log's, for other code too.
    """

    def __init__(self, descriptor: int, log: Path | None = None) -> None:
        self.log = log
        self.lost: OSError | None = None
        self._descriptor, self._stalls, self._lock = descriptor, False, threading.RLock()
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLOUT)

    def fileno(self) -> int:
        """The file descriptor."""
        return self._descriptor

    def isatty(self) -> bool:
        """Whether the descriptor is a terminal; False once the log has taken its place."""
        return os.isatty(self._descriptor)

    def writable(self) -> bool:
        """Always True."""
        return True

    def write(self, data: Any, /) -> int:
        """Writes the text to the descriptor, or what that does not take to the log."""
        rest = bytes(data)
        size = len(rest)
        with self._lock:
            try:
                while rest and self._is_ready():
                    rest = rest[os.write(self._descriptor, rest[:PIECE]) :]
            except BlockingIOError:  # somebody else made it so
                self._stalls = True
            except OSError as error:
                self._lose(error)
            if rest and self.log and ESCAPE not in rest:
                with suppress(OSError):
                    self._append(self.log, rest)
        return size

    def _is_ready(self) -> bool:
        self._stalls = not self._poll.poll(0 if self._stalls else PATIENCE_S * 1000)
        return not self._stalls

    def _lose(self, error: OSError) -> None:
        if self.lost is None and self.log:
            with suppress(OSError):
                self._append(self.log, f"(From here on because the output takes nothing any more: {error.strerror}.)\n".encode())
                replacement = os.open(self.log, os.O_WRONLY | os.O_APPEND)
                os.dup2(replacement, self._descriptor)
                os.close(replacement)
        self.lost = self.lost or error

    @staticmethod
    def _append(log: Path, data: bytes) -> None:
        log.parent.mkdir(exist_ok=True)
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            while data:
                data = data[os.write(file, data) :]
        finally:
            os.close(file)


def keep_output(log: Path | None = None) -> None:
    """Makes stdout and stderr of this process ``ResilientStream``: printing raises no error any more, whatever the encoding.

    Those that were closed when it started lead to /dev/null: else the next file that is opened would take their place.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        stream: TextIO | None = getattr(sys, name)
        if stream:
            with suppress(OSError):
                stream.flush()
        encoding = stream.encoding if stream else "utf-8"
        output = io.TextIOWrapper(ResilientStream(descriptor, log), encoding=encoding, errors="backslashreplace", write_through=True)  # type: ignore[type-var]
        setattr(sys, name, output)


def fall_back_to(log: Path) -> None:
    """Names the file that gets what cannot be written, once there is one."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(output := getattr(stream, "buffer", None), ResilientStream):
            output.log = log


def end_with_reader() -> None:
    """Lets a command that only shows something end without a word at `| head`."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)


def exit_code_of_display(code: int) -> int:
    """The exit code of a command that only shows something: 1 if that could not be written."""
    output = getattr(sys.stdout, "buffer", None)
    if not isinstance(output, ResilientStream) or output.lost is None:
        return code
    print(f"stdout: cannot be written ({output.lost.strerror}).", file=sys.stderr)
    return code or 1


def relay(source: int, output: ResilientStream) -> threading.Thread:
    """Copies what comes from a pipe, on a thread, until its end."""

    def copy() -> None:
        with suppress(OSError):
            while data := os.read(source, 1 << 16):
                output.write(data)

    thread = threading.Thread(target=copy, daemon=True, name="rlbatch-relay")
    thread.start()
    return thread


def rank_log(run_dir: Path, rank: int) -> Path:
    """The file with a rank's output; of rank 0 what the output of whoever started it did not take."""
    return run_dir / LOGS / f"rank{rank}.log"


def output_hint(rank: int) -> str:
    """Tells where a user finds a rank's output, for messages in the merged log."""
    return f"See logs/rank{rank}.log." if rank else "Its output is above."


def open_rank_log(run_dir: Path, rank: int) -> int:
    """A file descriptor that appends to a rank's file."""
    (run_dir / LOGS).mkdir(exist_ok=True)
    return os.open(rank_log(run_dir, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)


def redirect_output(run_dir: Path, rank: int) -> None:
    """Sends this process's output to its rank's file, unless it is rank 0 or its launcher did that already.

    What rank 0's output does not take goes to ``logs/rank0.log``. The first error of another rank still goes where its output went before.
    That descriptor is not inherited: a process that a rank leaves behind keeps no launcher waiting for the end of the output.
    """
    keep_output(rank_log(run_dir, 0) if rank == 0 else None)
    if rank == 0 or TERMINAL_VARIABLE in os.environ:
        return
    os.environ[TERMINAL_VARIABLE] = str(os.dup(2))
    log = open_rank_log(run_dir, rank)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
