"""Jobs as ``scontrol --oneliner show job`` prints them: one a line, several of an array or of a heterogeneous job."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence

Record = Mapping[str, str]

_JOB_NAME = re.compile(r" JobName=.*?(?= (?:HetJobIdSet|UserId)=)")
"""Left out: the user chose it, and it may look like other fields."""
_FIELD = re.compile(r"(?<!\S)([A-Z][\w/:]*)=(.*?)(?=\s+[A-Z][\w/:]*=|\s*$)")


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
    """What Slurm's commands are to be told to mean this job and no other: the id of a task of an array may be that of the whole array.

    Components of a heterogeneous job can be queued again and cancelled together only, by the id of the first.
    """
    if "HetJobId" in record:
        return record["HetJobId"]
    task = record.get("ArrayTaskId", "")
    return f"{record['ArrayJobId']}_{task}" if task.isdecimal() and "ArrayJobId" in record else record["JobId"]


def name_by_variables(job_id: str) -> str:
    """``own_name`` where Slurm does not answer: by this process's variables.

    Args:
        job_id: Slurm's id of this process's job.
    """
    array, task = (os.environ.get(f"SLURM_ARRAY_{name}_ID", "") for name in ("JOB", "TASK"))
    return f"{array}_{task}" if array and task else os.environ.get("SLURM_JOB_ID_HET_GROUP_0", job_id)
