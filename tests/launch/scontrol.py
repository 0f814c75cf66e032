"""A stand-in for ``scontrol``: shows a given record, and writes down what it was asked to requeue."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rlbatch.launch.ranks.rank_info import RankInfo

SCRIPT = """#!/bin/sh
case "$1" in
-o) test "$SLURM_TIME_FORMAT" = %s || exit 3; cat {folder}/record 2>/dev/null || exit 1 ;;
show) echo "Configuration data as of 2026"; echo "KillWait                = 12 sec" ;;
requeue) echo "$2" >> {folder}/requeued; test ! -e {folder}/refusal || {{ cat {folder}/refusal >&2; exit 1; }} ;;
esac
"""
# As Slurm 22.05 shows jobs with SLURM_TIME_FORMAT=%s, shortened.
RECORD = (
    "JobId=7 JobName=wrap UserId=root(0) Nice=0 JobState={state} Reason={reason} Dependency=(null) Requeue={requeue} Restarts={restarts} "
    "BatchFlag={batch} Reboot=0 ExitCode=0:0 TimeLimit=00:10:00 StartTime=1000 EndTime={end} Deadline=N/A PreemptEligibleTime=1000 "
    "PreemptTime={preempt} Partition=batch WorkDir=/tmp/a b Power= \n"
)
RUNNING = {"state": "RUNNING", "reason": "None", "requeue": 1, "restarts": 0, "batch": 1, "end": 2000, "preempt": "None"}
PREEMPTED = {"preempt": 1400, "end": 1460}
CANCELLED = {"state": "COMPLETING", "end": 1400}
TIME_LIMIT = {"state": "COMPLETING", "reason": "TimeLimit"}
REQUEUED = {"state": "COMPLETING", "restarts": 1}


class FakeSlurm:
    """The Slurm of job 7."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def shows(self, **values: object) -> None:
        """What it says of the job; ``RUNNING`` otherwise."""
        other = RECORD.format(**RUNNING).replace("JobId=7", "JobId=8").replace("RUNNING", "PENDING")
        (self._folder / "record").write_text(other + RECORD.format(**{**RUNNING, **values}))

    def rename(self, fields: str) -> None:
        """Says these fields in the place of the job's id."""
        path = self._folder / "record"
        path.write_text(path.read_text().replace("JobId=7 ", f"{fields} "))

    def refuses(self, message: str) -> None:
        """Requeues nothing any more."""
        (self._folder / "refusal").write_text(message)

    @property
    def requeued(self) -> list[str]:
        """Jobs that it was asked to requeue."""
        path = self._folder / "requeued"
        return path.read_text().split() if path.exists() else []


def fake_slurm(folder: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    """Puts the stand-in into the path, and this process into job 7."""
    program = folder / "bin" / "scontrol"
    program.parent.mkdir()
    program.write_text(SCRIPT.format(folder=folder))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    return FakeSlurm(folder)


def job(restart_count: int = 0, job_id: str = "7") -> RankInfo:
    """Rank 0 of job 7."""
    return RankInfo(0, 2, 0, 2, 0, "n1", job_id=job_id, restart_count=restart_count)
