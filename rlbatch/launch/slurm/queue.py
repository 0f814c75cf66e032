"""A job in Slurm's queue, seen from where it was submitted: slurmctld is asked, then the accounting, where there is one."""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass

from rlbatch.api import ConfigError
from rlbatch.launch.slurm.scontrol import ask, find_record, own_name, read_records

TIMEOUT_S = 60.0
ENDED = (
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED", "TIMEOUT"),
    "UNKNOWN",
)
"""States that a job does not leave."""
UNKNOWN = "UNKNOWN"
REASON_S = 2.0
"""Seconds to wait for the reason why a new job waits: Slurm's scheduler looks at it within about a second."""


@dataclass(frozen=True)
class JobState:
    """What Slurm says of a job.

    Attributes:
        state: Slurm's word; ``UNKNOWN`` if neither slurmctld nor the accounting knows the job.
        reason: Why it waits or ended, as Slurm says; empty if it does not.
        nodes: Slurm's node list; empty before it starts.
        exit_code: Exit code as a shell tells it: 128 + signal. None before the end.
        restarts: How often it was requeued.
        log: File with the batch script's output; empty if unknown.
    """

    state: str
    reason: str = ""
    nodes: str = ""
    exit_code: int | None = None
    restarts: int = 0
    log: str = ""

    @property
    def ended(self) -> bool:
        """Whether the job is over."""
        return self.state in ENDED


def job_state(job_id: str) -> JobState:
    """State of a Slurm job: what ``scontrol`` says, or else ``sacct``; UNKNOWN if neither knows it."""
    return _from_controller(job_id) or _from_accounting(job_id) or JobState(UNKNOWN, "neither scontrol nor sacct knows it")


def queued_state(job_id: str) -> JobState:
    """Asks for the state of a job that was submitted just now, as ``job_state``, and waits a moment for the reason why it waits."""
    deadline = time.monotonic() + REASON_S
    while True:
        state = job_state(job_id)
        if state.state != "PENDING" or state.reason or time.monotonic() > deadline:
            return state
        time.sleep(0.2)


def cancel_job(job_id: str) -> None:
    """Cancels a job, running or not; raises ConfigError if scancel refused."""
    done = ask("scancel", job_id, seconds=TIMEOUT_S)
    if done is None or done.returncode:
        said = " ".join(done.stderr.split()) if done else "there is no scancel here"
        raise ConfigError(f"job {job_id}: cannot be cancelled ({said}). Give the id of a job of yours that runs or waits.")


def _from_controller(job_id: str) -> JobState | None:
    done = ask("scontrol", "--oneliner", "show", "job", job_id, seconds=TIMEOUT_S)
    if done is None or done.returncode:
        return None
    fields = find_record(done.stdout, job_id)
    if fields is None or "JobState" not in fields:
        return None
    state = fields["JobState"]
    nodes = [_word(record.get("NodeList", "")) for record in read_records(done.stdout) if own_name(record) == own_name(fields)]
    return JobState(
        state=state,
        reason=_word(fields.get("Reason", "")),
        nodes=",".join(filter(None, nodes)),
        exit_code=_exit_code(fields.get("ExitCode", ""), state) if state in ENDED else None,
        restarts=int(fields.get("Restarts", "0") or 0),
        log=_word(fields.get("StdOut", "")),
    )


def _from_accounting(job_id: str) -> JobState | None:
    options = ("--noheader", "--parsable2", "--allocations", f"--jobs={job_id}", "--format=State,ExitCode,NodeList")
    done = ask("sacct", *options, seconds=TIMEOUT_S)
    if done is None or done.returncode or not done.stdout.strip():
        return None
    state, exit_code, nodes = done.stdout.strip().splitlines()[-1].split("|")[:3]
    state = state.split()[0]  # CANCELLED by 1000
    return JobState(state, nodes=_word(nodes), exit_code=_exit_code(exit_code, state) if state in ENDED else None)


def _exit_code(text: str, state: str) -> int:
    """``1:0`` is exit code 1, ``0:9`` the signal 9, ``0:125`` out of memory; a job that ended badly is never 0."""
    code, number = (int(part or 0) for part in text.partition(":")[::2])
    found = code or (128 + number if 0 < number < signal.NSIG else 0)
    return found or (0 if state == "COMPLETED" else 1)


def _word(text: str) -> str:
    return "" if text in ("(null)", "None", "None assigned") else text
