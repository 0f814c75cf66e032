"""Knows which jobs were started from here (a record in the run folder, and a list of all), and follows a batch job's merged log."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from rlbatch.api import ConfigError, LaunchError
from rlbatch.api.exit_codes import FAILED
from rlbatch.config.bounded_files import read_own
from rlbatch.launch.records.attempt import ATTEMPT, read_attempt
from rlbatch.launch.records.failures import read_first_error
from rlbatch.launch.slurm.queue import UNKNOWN, JobState, cancel_job, job_state

RECORD = "job.json"
_PROCESS = "pid"
_ENDED = {"finished": ("COMPLETED", 0), "failed": ("FAILED", 1), "interrupted": ("CANCELLED", 143)}
"""``status`` in summary.json -> Slurm's word and the exit code."""
LOG_POLL_S = 0.5
STATE_POLL_S = 3.0
FORGOTTEN_S = 60.0
"""Seconds for which Slurm's controller may not answer before the job counts as ended."""


@dataclass(frozen=True)
class JobRecord:
    """A job that was started.

    Attributes:
        job_id: Slurm's; ``pid<N>`` of the process that waits for mpirun.
        launcher: ``slurm``, ``sbatch`` (a batch script of the user's) or ``mpi``; ``local``: of a run that is in no list.
        name: What the queue shows.
        run_dir: Run folder.
        log: File with the merged log; empty: whoever started it has it.
        host: Where it was started.
        submitted: Seconds since the epoch.
    """

    job_id: str
    launcher: str
    name: str
    run_dir: str
    log: str
    host: str
    submitted: float

    @property
    def is_slurm(self) -> bool:
        """Whether the job was given to Slurm, and is no process of this machine."""
        return not self.job_id.startswith(_PROCESS)

    def state(self) -> JobState:
        """The job's state now; where Slurm has forgotten it, what the run folder's summary says."""
        if not self.is_slurm:
            return self._process_state()
        state = job_state(self.job_id)
        return self._summary_state() or state if state.state == UNKNOWN else state

    def cancel(self) -> None:
        """Ends the job; raises ConfigError if it cannot be ended from here."""
        if self.is_slurm:
            state = job_state(self.job_id)
            if state.ended and state.state != UNKNOWN:  # scancel says nothing then
                raise ConfigError(f"job {self.job_id}: has ended ({state.state}). There is nothing to cancel.")
            return cancel_job(self.job_id)
        if self.host != socket.gethostname() or not self._is_alive():
            raise ConfigError(f"job {self.job_id}: no process of {self.host} that runs. See its state with `python -m rlbatch.jobs show`.")
        os.kill(self._pid, 15)
        return None

    @property
    def _pid(self) -> int:
        return int(self.job_id.removeprefix(_PROCESS))

    def _is_alive(self) -> bool:
        with suppress(OSError):
            # A pid is used again: only a process that names this run or submit itself counts.
            return b"rlbatch" in Path(f"/proc/{self._pid}/cmdline").read_bytes()
        return False

    def _process_state(self) -> JobState:
        if self.host == socket.gethostname() and self._is_alive():
            return JobState("RUNNING", nodes=self.host)
        if (state := self._summary_state()) is not None:
            return state
        if self.host == socket.gethostname() and read_attempt(Path(self.run_dir)) is not None:
            return JobState("FAILED", "ended without a word", exit_code=1)
        return JobState(UNKNOWN, f"its process on {self.host} is gone, or cannot be seen from here")

    def _summary_state(self) -> JobState | None:
        """How the job ended, by summary.json; None if another job had the run folder since, or it does not say."""
        last = read_record(Path(self.run_dir))
        if self.launcher != "local" and (last is None or last.job_id != self.job_id):
            return None
        with suppress(OSError, ValueError):
            summary = read_own(Path(self.run_dir) / "summary.json")
            if summary.get("status") in _ENDED:
                state, code = _ENDED[summary["status"]]
                return JobState(state, exit_code=code)
        return None


def process_id() -> str:
    """The id of a job that this process waits for."""
    return f"{_PROCESS}{os.getpid()}"


def new_record(job_id: str, launcher: str, name: str, run_dir: Path, log: str) -> JobRecord:
    """Records a job that was started just now, in its run folder and in the list."""
    record = JobRecord(job_id, launcher, name, str(run_dir), log, socket.gethostname(), time.time())
    line = json.dumps(asdict(record))
    draft = run_dir / f".{RECORD}.part"  # whoever lists jobs meanwhile reads a whole one
    draft.write_text(line + "\n", encoding="utf-8")
    draft.replace(run_dir / RECORD)
    with suppress(OSError):  # a home that cannot be written: the run folder still has it
        index_path().parent.mkdir(parents=True, exist_ok=True)
        with index_path().open("a", encoding="utf-8") as index:
            index.write(line + "\n")
    return record


def index_path() -> Path:
    """The list of jobs: ``$XDG_STATE_HOME/rlbatch/jobs.jsonl``."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "rlbatch" / "jobs.jsonl"


def read_record(run_dir: Path) -> JobRecord | None:
    """The last job of a run folder, or None."""
    with suppress(OSError, ValueError, TypeError, KeyError):
        return _record(read_own(run_dir / RECORD))
    return None


def read_jobs() -> list[JobRecord]:
    """All jobs whose run folder still exists, the newest last; a job that was requeued is listed once."""
    try:
        lines = index_path().read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    records = {record.job_id + record.run_dir: record for record in map(_parse, lines) if record is not None}
    return [record for record in records.values() if Path(record.run_dir).is_dir()]


def find_job(text: str) -> JobRecord:
    """The job with this id, or the last one of this run folder; raises ConfigError if there is none."""
    record = read_record(Path(text)) or _local_record(Path(text).resolve()) if Path(text).is_dir() else None
    records = [record] if record else read_jobs()
    found = [record] if record else [record for record in records if record.job_id == text]
    if tasks := [] if found else [record.job_id for record in records if record.job_id.startswith(f"{text}_")]:
        raise ConfigError(f"job {text}: is an array, each of its tasks a job of its own. Name one: {', '.join(tasks)}.")
    if not found:
        raise ConfigError(f"job {text}: not started from here. `python -m rlbatch.jobs` lists the jobs; a run folder names its job too.")
    return found[-1]


def _local_record(run_dir: Path) -> JobRecord | None:
    """The job of a run that was started by no command that records jobs: rank 0's process."""
    with suppress(OSError, LaunchError):
        attempt, began = read_attempt(run_dir), (run_dir / ATTEMPT).stat().st_mtime
        return JobRecord(f"{_PROCESS}{attempt.pid}", "local", run_dir.name, str(run_dir), "", attempt.host, began) if attempt else None
    return None


def _parse(line: str) -> JobRecord | None:
    with suppress(ValueError, TypeError, KeyError):
        return _record(json.loads(line))
    return None


def _record(values: Mapping[str, Any]) -> JobRecord:
    return JobRecord(**{field.name: values[field.name] for field in fields(JobRecord)})


def follow(record: JobRecord) -> int:
    """Copies the log to stdout until the job has ended, and returns its exit code; changes of its state go to stderr."""
    tail = _Tail(Path(record.log))
    shown = ""
    known = time.monotonic()
    while True:
        state = record.state()
        if state.state != "UNKNOWN":
            known = time.monotonic()
        if _words(state) != shown:
            shown = _words(state)
            tail.copy()
            print(f"job {record.job_id}: {shown}", file=sys.stderr, flush=True)
        if state.ended and (state.state != "UNKNOWN" or time.monotonic() - known > FORGOTTEN_S):
            break
        until = time.monotonic() + STATE_POLL_S
        while time.monotonic() < until:
            tail.copy()
            time.sleep(LOG_POLL_S)
    tail.copy()
    error = read_first_error(Path(record.run_dir))
    if error is not None and state.exit_code and str(error) not in tail.last:
        print(error, file=sys.stderr)
    return FAILED if state.exit_code is None else state.exit_code


class _Tail:
    """What was appended to a file since the last look; the file may not exist yet."""

    def __init__(self, path: Path) -> None:
        self._path, self._position = path, 0
        self.last = ""

    def copy(self) -> None:
        try:
            with self._path.open("rb") as file:
                file.seek(self._position)
                data = file.read()
        except OSError:
            return
        if data:
            self._position += len(data)
            text = data.decode(errors="replace")
            self.last = (self.last + text)[-100_000:]
            print(text, end="", flush=True)


def _words(state: JobState) -> str:
    where = f" on {state.nodes}" if state.nodes and not state.ended else ""
    why = f" ({state.reason})" if state.reason else ""
    again = f", requeued {state.restarts} x" if state.restarts else ""
    return f"{state.state}{where}{why}{again}"
