"""Shows a batch job's merged log while it runs."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TextIO

from rlbatch.api.exit_codes import FAILED
from rlbatch.launch.jobs.record import JobRecord
from rlbatch.launch.records.failures import read_first_error
from rlbatch.launch.slurm.queue import JobState

LOG_POLL_S = 0.5
STATE_POLL_S = 3.0
FORGOTTEN_S = 60.0
"""A controller that does not answer for a while is no end of the job."""


def follow(record: JobRecord, out: TextIO | None = None) -> int:
    """Copies the log to the terminal until the job has ended; changes of its state go to stderr.

    Args:
        record: The job.
        out: Where to; None: stdout.

    Returns:
        The job's exit code.
    """
    tail = _Tail(Path(record.log), out or sys.stdout)
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

    def __init__(self, path: Path, out: TextIO) -> None:
        self._path, self._out, self._position = path, out, 0
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
            self._out.write(text)
            self._out.flush()


def _words(state: JobState) -> str:
    where = f" on {state.nodes}" if state.nodes and not state.ended else ""
    why = f" ({state.reason})" if state.reason else ""
    again = f", requeued {state.restarts} x" if state.restarts else ""
    return f"{state.state}{where}{why}{again}"
