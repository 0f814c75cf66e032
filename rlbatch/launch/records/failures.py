"""One message for one failure: the first rank that fails records it in the run folder and alone prints it.

When a rank fails its peers fail too, with errors of the transport that hide the cause.
"""

from __future__ import annotations

import json
import os
import select
import socket
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rlbatch.api import RlbatchError
from rlbatch.api.exit_codes import FAILED
from rlbatch.config.bounded_files import read_own
from rlbatch.foreign_code import text
from rlbatch.launch.ranks.variables import LAUNCH_VARIABLE
from rlbatch.launch.records.disk import write_problem
from rlbatch.launch.records.streams import TERMINAL_VARIABLE, ResilientStream

FIRST_ERROR = "first_error.json"
MOST_CHARACTERS = 20_000
"""Characters that are kept of each end of a traceback that is longer."""
LAUNCHER = -1
"""Rank of an error if no rank said what happened, and the launcher does not say which one failed."""
CLOCK_S = 3.0
"""Difference of clocks within which a record counts as of this start."""
CLAIM_VARIABLE = "RLBATCH_CLAIM_FD"
"""File descriptor of a pipe with one byte, from a launcher on this machine: where nothing can be recorded, who takes it is the first."""
_SYSTEM = ("No space left", "os error 28", "File too large", "Disk quota", "Read-only file system", "file write failed")
PATIENCE_S = 1.0
"""Seconds that an unforeseen error waits to be recorded: it may follow from the end of another rank, which the launcher then records."""
UNFINISHED = "unfinished"


@dataclass(frozen=True)
class FirstError:
    """Contents of first_error.json.

    Attributes:
        rank: Rank that failed first; ``LAUNCHER``: nobody knows.
        host: Its node.
        type: Class of the exception; ``Exit`` if the process ended without one, ``Hang`` if the others waited for it in vain.
        message: The message for the user.
        traceback: Python's, or where a rank hangs; empty if there is none.
        time: Seconds since the epoch.
        start: Identity of the job's start; see ``_this_start``.
    """

    rank: int
    host: str
    type: str
    message: str
    traceback: str
    time: float
    start: str = ""

    def __str__(self) -> str:
        """The text that users see: who failed, and the message or traceback."""
        is_ours = self.type in ("Exit", "Hang") or not self.traceback
        who = f"host {self.host}" if self.rank == LAUNCHER else f"rank {self.rank} host {self.host}"
        return f"[{who}] {self.message if is_ours else self.traceback.rstrip()}"


class StoppedBySignal(SystemExit):
    """What a rank's signal handler raises: it unwinds, so that engines are closed, and is no failure of this rank."""


class Reported(SystemExit):
    """Ends a rank whose failure was told already, by it or by another one."""


@contextmanager
def reporting_failures(run_dir: Path, rank: int) -> Iterator[None]:
    """Turns any exception of a rank into exit code 1, recorded and printed if it is the job's first; what foreign code raises in the
    place of ``sys.exit`` or Ctrl-C too.
    """
    try:
        yield
    except (StoppedBySignal, Reported):
        raise
    except BaseException as error:  # the outermost frame of a rank: nothing may pass unrecorded, KeyboardInterrupt neither
        if not isinstance(error.__cause__ or error, RlbatchError):
            time.sleep(PATIENCE_S)
        report_failure(run_dir, rank, error)
        raise SystemExit(FAILED) from None


def report_failure(run_dir: Path, rank: int, error: BaseException) -> bool:
    """Records and prints an error unless another rank was first; returns whether this was the first."""
    return claim(run_dir, failure_of(error, rank, socket.gethostname(), run_dir))


def failure_of(error: BaseException, rank: int, host: str, run_dir: Path) -> FirstError:
    """The record of a rank's exception; users see no traceback of an ``RlbatchError``, nor of a run folder that is full or gone."""
    if is_of_system(error) and (found := write_problem(run_dir)):
        said = " ".join(str(error).split())
        return FirstError(rank, host, "ConfigError", f"run_dir={run_dir}: {found}, then start again. ({said})", "", time.time())
    if isinstance(error, RlbatchError):
        return FirstError(rank, host, type(error).__name__, str(error) or type(error).__name__, "", time.time())
    lines = "".join(traceback.format_exception(error))
    if len(lines) > MOST_CHARACTERS:
        lines = f"{lines[:MOST_CHARACTERS]}\n... ({len(lines)} characters) ...\n{lines[-MOST_CHARACTERS:]}"
    message = f"code called sys.exit({error.code})" if isinstance(error, SystemExit) else text(error) or type(error).__name__
    return FirstError(rank, host, type(error).__name__, message, lines, time.time())


def is_of_system(error: BaseException) -> bool:
    """Whether an error comes from the operating system and is not told yet, even if a library has put it into words of its own."""
    is_told = isinstance(error, RlbatchError) or not isinstance(error, Exception)
    return not is_told and (isinstance(error, OSError) or any(word in text(error) for word in _SYSTEM))


_claims: dict[Path, FirstError] = {}


def _is_first_claim(run_dir: Path, error: FirstError) -> bool:
    """Decides in memory which error is the first: among a launcher's processes on this machine, else in this process."""
    try:
        return bool(os.read(int(os.environ[CLAIM_VARIABLE]), 1))
    except KeyError:
        return _claims.setdefault(run_dir, error) is error
    except OSError:  # it is taken
        return False


def _is_claimed(run_dir: Path) -> bool:
    """Whether an error was told that could not be recorded."""
    try:
        return not select.select([int(os.environ[CLAIM_VARIABLE])], [], [], 0)[0]
    except (KeyError, OSError, ValueError):
        return run_dir in _claims


def claim(run_dir: Path, error: FirstError) -> bool:
    """Writes first_error.json and prints the error; False: there is one. Where it cannot be written, memory has to do for the decision."""
    # Linking a finished file claims the name atomically and never shows half a record.
    draft = run_dir / f".{FIRST_ERROR}.{error.rank}.{os.getpid()}"
    unrecorded, is_claimed = "", _is_claimed(run_dir)
    try:
        draft.write_text(json.dumps(asdict(replace(error, start=_this_start())), indent=2) + "\n", encoding="utf-8")
        os.link(draft, run_dir / FIRST_ERROR)
    except FileExistsError:
        return False
    except OSError as problem:
        if (run_dir / FIRST_ERROR).exists() or not _is_first_claim(run_dir, error):
            return False
        unrecorded = "" if str(run_dir) in error.message else f"\n(This could not be written to {run_dir}: {problem.strerror}.)"
    finally:
        with suppress(OSError):
            draft.unlink()
    if not is_claimed:  # else this one follows from that, and can be recorded: as when a rank had no files left
        tell_user(f"{error}{unrecorded}")
    return True


def read_first_error(run_dir: Path) -> FirstError | None:
    """The job's first failure, or None. What a crash of the machine left half written counts as one of long ago."""
    try:
        return FirstError(**read_own(run_dir / FIRST_ERROR))
    except OSError:
        return None
    except (ValueError, TypeError):
        return FirstError(0, "?", "Unknown", f"{run_dir / FIRST_ERROR} is damaged: what it said is lost.", "", 0.0)


def _this_start() -> str:
    """What all ranks of this start have alike, and no other start has; empty: their launcher gives nothing of the kind."""
    job, restart, step = (os.environ.get(f"SLURM_{name}", "") for name in ("JOB_ID", "RESTART_COUNT", "STEP_ID"))
    return os.environ.get(LAUNCH_VARIABLE) or (f"{job}.{restart or 0}.{step}" if job and step else "")


def is_earlier(error: FirstError) -> bool:
    """Whether a recorded failure is that of a start before this process's, which a slow node may begin long after the others."""
    import psutil  # only ranks need it

    if error.start and error.start == _this_start():
        return False
    return bool(error.time < psutil.Process().create_time() - CLOCK_S)


def has_failed(run_dir: Path) -> bool:
    """Whether a rank of this start has failed."""
    error = read_first_error(run_dir)
    return error is not None and not is_earlier(error)


def tell_user(text: str) -> None:
    """Prints a line where the launcher's user sees it, whatever became of this rank's own output."""
    sys.stdout.flush()
    ResilientStream(int(os.environ.get(TERMINAL_VARIABLE, "2"))).write((text + "\n").encode(errors="backslashreplace"))


def mark_unfinished(run_dir: Path) -> None:
    """Marks a run whose ranks are about to start as not finished."""
    (run_dir / UNFINISHED).touch()


def mark_finished(run_dir: Path) -> None:
    """Records, on rank 0, that this attempt is at its end, before what may start the next one. It needs no room on a disk."""
    with suppress(OSError):
        (run_dir / UNFINISHED).unlink(missing_ok=True)


def claim_unfinished(run_dir: Path) -> bool:
    """Whether the run is not at its end although all ranks ended with 0, as a launcher asks; that is recorded as its first error."""
    if not (run_dir / UNFINISHED).exists():
        return False
    text = "all ranks ended with exit code 0 before the run did: os._exit, or exit() in C code. Their output is above, or in logs/."
    claim(run_dir, FirstError(LAUNCHER, socket.gethostname(), "Exit", text, "", time.time()))
    return True
