"""What Slurm says of a job, with and without accounting."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rlbatch.api import ConfigError
from rlbatch.launch.slurm.queue import JobState, cancel_job, job_state
from tests.fake_slurm import FakeSlurm


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    return FakeSlurm(tmp_path / "slurm", monkeypatch, os.environ["PATH"])


def test_running(slurm: FakeSlurm) -> None:
    """Nodes, requeues and the log of a job that runs; no exit code yet."""
    slurm.job("7", "RUNNING", NodeList="n[1-2]", StdOut="/runs/a/job.log", Restarts="2")
    assert job_state("7") == JobState("RUNNING", "", "n[1-2]", None, 2, "/runs/a/job.log")
    assert not job_state("7").ended


def test_names_and_paths_with_blanks(slurm: FakeSlurm) -> None:
    """What users chose looks like no other field."""
    slurm.job("7", "RUNNING", JobName="a JobState=FAILED ExitCode=9:0", StdOut="/runs/a b/job.log", Power="")
    assert job_state("7") == JobState("RUNNING", log="/runs/a b/job.log")


def test_parts(slurm: FakeSlurm) -> None:
    """Of several jobs of one id the task of an array that was asked for counts; a heterogeneous job has the nodes of its components."""
    task = "JobId={} ArrayJobId=7 ArrayTaskId={} JobName=x UserId=root(0) JobState={} Reason=None NodeList={}\n"
    slurm.says("scontrol", task.format(7, 2, "RUNNING", "n3") + task.format(9, 1, "FAILED", "n2"))
    assert [(job_state(name).state, job_state(name).nodes) for name in ("7", "7_2", "7_1", "9")] == [
        *(("RUNNING", "n3"), ("RUNNING", "n3"), ("FAILED", "n2"), ("FAILED", "n2"))
    ]
    part = "JobId={} HetJobId=7 HetJobOffset={} JobName=x HetJobIdSet=7-8 UserId=root(0) JobState=RUNNING Reason=None NodeList={}\n"
    slurm.says("scontrol", part.format(7, 0, "n[1-2]") + part.format(8, 1, "n5"))
    assert job_state("7") == JobState("RUNNING", nodes="n[1-2],n5")


@pytest.mark.parametrize(
    ("state", "exit_code", "code"),
    [
        *(("COMPLETED", "0:0", 0), ("FAILED", "3:0", 3), ("FAILED", "0:9", 137), ("CANCELLED", "0:0", 1), ("TIMEOUT", "0:0", 1)),
        ("OUT_OF_MEMORY", "0:125", 1),  # no signal: how Slurm tells it
    ],
)
def test_exit_codes(slurm: FakeSlurm, state: str, exit_code: str, code: int) -> None:
    """As a shell would tell them; a job that ended badly is never 0."""
    slurm.job("7", state, exit_code, Reason="NonZeroExitCode")
    found = job_state("7")
    assert (found.exit_code, found.ended, found.reason) == (code, True, "NonZeroExitCode")


def test_forgotten_by_the_controller(slurm: FakeSlurm) -> None:
    """After some minutes slurmctld forgets a job; the accounting then answers."""
    slurm.says("scontrol", err="slurm_load_jobs error: Invalid job id specified", rc=1)
    slurm.says("sacct", "CANCELLED by 1000|0:15|n[1-2]\n")
    assert job_state("7") == JobState("CANCELLED", "", "n[1-2]", 143)


def test_forgotten_without_accounting(slurm: FakeSlurm) -> None:
    """Without accounting sacct fails: the state is unknown, which is an end too."""
    slurm.says("scontrol", err="slurm_load_jobs error: Invalid job id specified", rc=1)
    slurm.says("sacct", err="Slurm accounting storage is disabled", rc=1)
    assert job_state("7").state == "UNKNOWN"
    assert job_state("7").ended


def test_no_slurm_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Away from a cluster nothing is known, and nothing can be cancelled."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert job_state("7").state == "UNKNOWN"
    with pytest.raises(ConfigError, match=r"job 7: cannot be cancelled \(there is no scancel here\)"):
        cancel_job("7")


def test_cancel(slurm: FakeSlurm) -> None:
    """scancel is asked; what it refuses is told."""
    cancel_job("7")
    assert slurm.calls() == ["scancel 7"]
    slurm.says("scancel", err="scancel: error: Kill job error on job id 7: Invalid job id specified", rc=1)
    with pytest.raises(ConfigError, match="Invalid job id specified"):
        cancel_job("7")
