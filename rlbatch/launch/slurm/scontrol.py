"""Jobs as ``scontrol`` prints them, the one that this process belongs to, and the request to queue it again."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlbatch.launch.ranks.rank_info import RankInfo

Record = Mapping[str, str]

_JOB_NAME = re.compile(r" JobName=.*?(?= (?:HetJobIdSet|UserId)=)")
"""The field with a job's name, which is left out: the user chose it, and it may look like other fields."""
_FIELD = re.compile(r"(?<!\S)([A-Z][\w/:]*)=(.*?)(?=\s+[A-Z][\w/:]*=|\s*$)")
QUERY_S = 20.0
"""Longest wait for an answer of Slurm's controller."""


def read_records(text: str) -> Sequence[Record]:
    """The fields of each job. Paths, which may hold anything, come last: the first of two fields of one name counts."""
    found: list[Record] = []
    for line in text.splitlines():
        fields: dict[str, str] = {}
        for name, value in _FIELD.findall(_JOB_NAME.sub("", line)):
            fields.setdefault(name, value)
        if "JobId" in fields:
            found.append(fields)
    return found


def find_record(text: str, job_id: str) -> Record | None:
    """The job of this id: ``77``, or ``77_3`` of a task of an array. The others are further tasks, or components of a heterogeneous job."""
    return next((record for record in read_records(text) if job_id in (record["JobId"], own_name(record))), None)


def own_name(record: Record) -> str:
    """The id by which Slurm's commands mean this job and no other: that of an array's task may be the id of the whole array.

    Components of a heterogeneous job can be queued again and cancelled together only, by the id of the first.
    """
    if "HetJobId" in record:
        return record["HetJobId"]
    task = record.get("ArrayTaskId", "")
    return f"{record['ArrayJobId']}_{task}" if task.isdecimal() and "ArrayJobId" in record else record["JobId"]


def name_by_variables(job_id: str) -> str:
    """``own_name`` where Slurm does not answer: by this process's variables."""
    array, task = (os.environ.get(f"SLURM_ARRAY_{name}_ID", "") for name in ("JOB", "TASK"))
    return f"{array}_{task}" if array and task else os.environ.get("SLURM_JOB_ID_HET_GROUP_0", job_id)


@dataclass(frozen=True)
class CurrentJob:
    """A job's record, as ``scontrol show job`` shows it.

    Attributes:
        name: What Slurm's commands call it: ``77_3`` of a task of an array.
        state: E.g. RUNNING, PENDING, COMPLETING.
        reason: Why it is in that state, e.g. TimeLimit.
        restarts: How often it was queued again.
        is_batch: Whether it has a batch script: others cannot be queued again.
        may_requeue: Whether it was submitted with --requeue (or that is the cluster's default).
        end_time: When Slurm will end it, seconds since the epoch: the time limit, or the end of the grace time once it is preempted.
            None: no limit.
        is_preempted: Whether it is to make room for another job.
    """

    name: str
    state: str
    reason: str
    restarts: int
    is_batch: bool
    may_requeue: bool
    end_time: float | None
    is_preempted: bool


def slurm_job_id(info: RankInfo) -> str:
    """Slurm's number of this job; empty if Slurm did not start it."""
    return info.job_id if info.job_id and {"SLURM_JOB_ID", "SLURM_JOBID", "SLURM_JOB_ID_HET_GROUP_0"} & os.environ.keys() else ""


def find_current_job(job_id: str) -> CurrentJob | None:
    """The job's record; None where there is no scontrol, no controller, or no such job any more."""
    answer = ask("scontrol", "-o", "show", "job", job_id)
    if answer is None or answer.returncode:
        return None
    own = find_record(answer.stdout, job_id)
    return _parsed(own) if own else None


def current_job_name() -> str:
    """What Slurm's commands call the job that this process runs in; empty outside of jobs."""
    job_id = os.environ.get("SLURM_JOB_ID", "")
    job = find_current_job(job_id) if job_id else None
    return job.name if job else job_id and name_by_variables(job_id)


def _parsed(record: Record) -> CurrentJob:
    ends, restarts = record.get("EndTime", ""), record.get("Restarts", "")
    return CurrentJob(
        name=own_name(record),
        state=record.get("JobState", ""),
        reason=record.get("Reason", ""),
        restarts=int(restarts) if restarts.isdecimal() else 0,
        is_batch=record.get("BatchFlag") != "0",
        may_requeue=record.get("Requeue") != "0",
        end_time=float(ends) if ends.isdecimal() else None,
        is_preempted=record.get("PreemptTime", "None") != "None" or record.get("JobState") == "PREEMPTED",
    )


def kill_wait_s() -> float | None:
    """Seconds that Slurm gives a job from SIGTERM to SIGKILL; None if it does not say."""
    answer = ask("scontrol", "show", "config")
    found = re.search(r"^KillWait\s*=\s*(\d+)", answer.stdout, re.MULTILINE) if answer else None
    return float(found[1]) if found else None


def requeue_job(job_id: str) -> str:
    """Queues a job again, by ``CurrentJob.name``; Slurm ends what still runs of it. Returns why not; empty: it was done."""
    answer = ask("scontrol", "requeue", job_id)
    if answer is None:
        return "there is no scontrol on this node, or it does not answer"
    return "" if answer.returncode == 0 else (answer.stderr.strip() or f"scontrol ended with code {answer.returncode}")


def ask(program: str, *arguments: str, seconds: float = QUERY_S) -> subprocess.CompletedProcess[str] | None:
    """Runs one of Slurm's commands; None where it is not there, or does not answer in time.

    In a session of its own and once more if a signal ended it: Slurm signals all processes of a job that it stops, these too.
    """
    path = shutil.which(program)
    for _ in range(2 if path else 0):
        try:
            answer = subprocess.run(
                [str(path), *arguments],
                env=os.environ | {"SLURM_TIME_FORMAT": "%s"},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=seconds,
                start_new_session=True,
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        if answer.returncode >= 0:
            return answer
    return None
