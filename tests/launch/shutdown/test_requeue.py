"""How a job that was asked to stop goes on: queued again once, or the user is told what to do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from rlbatch.config.schema import Config
from rlbatch.launch.records.history import begin_attempt, end_attempt, read_history
from rlbatch.launch.shutdown.requeue import go_on_later
from rlbatch.launch.shutdown.signals import Ending
from tests.launch.scontrol import CANCELLED, PREEMPTED, REQUEUED, TIME_LIMIT, FakeSlurm, fake_slurm, job

PREEMPTION = Ending("preempted (SIGUSR2)", 0.0)
AGAIN = "the command that started it, with run_dir={} resume=auto."


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    slurm = fake_slurm(tmp_path, monkeypatch)
    slurm.shows()
    return slurm


def stopped(run_dir: Path, ending: Ending = PREEMPTION, first: int = 2, last: int | None = 3, restart_count: int = 0) -> str:
    """An attempt that began after step ``first`` and ends after step ``last``."""
    begin_attempt(run_dir, job(restart_count), first)
    return go_on_later(run_dir, Config(), job(restart_count), last, ending)


@pytest.mark.parametrize("record", [{}, PREEMPTED, TIME_LIMIT])
def test_a_job_is_queued_again(record: dict, slurm: FakeSlurm, tmp_path: Path) -> None:
    """Preempted or near its time limit: once, by rank 0, with the end of this attempt on record."""
    slurm.shows(**record)
    assert stopped(tmp_path) == "preempted (SIGUSR2): stopped after step 3; job 7 is queued again."
    assert slurm.requeued == ["7"]
    [attempt] = read_history(tmp_path).attempts
    assert (attempt.first_step, attempt.last_step, attempt.why, attempt.job_id) == (2, 3, "preempted (SIGUSR2)", "7")
    assert attempt.ended >= attempt.began > 0


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ("JobId=7 ArrayJobId=7 ArrayTaskId=3", "7_3"),
        ("JobId=7 ArrayJobId=5 ArrayTaskId=0", "5_0"),
        ("JobId=7 HetJobId=6 HetJobOffset=1", "6"),
    ],
    ids=["a task with the id of its array", "another task", "a component"],
)
def test_a_part_is_named(fields: str, name: str, slurm: FakeSlurm, tmp_path: Path) -> None:
    """The id of one task of an array means all its tasks to Slurm: they would be killed. Components are queued again together only."""
    slurm.shows()
    slurm.rename(fields)
    said = go_on_later(tmp_path, Config(), job(), 3, Ending("time limit (SIGUSR2)", 0.0))
    assert (slurm.requeued, said) == ([name], f"time limit (SIGUSR2): stopped after step 3; job {name} is queued again.")


@pytest.mark.parametrize(
    ("variables", "name"),
    [({"ARRAY_JOB_ID": "7", "ARRAY_TASK_ID": "3"}, "7_3"), ({"JOB_ID_HET_GROUP_0": "6"}, "6"), ({}, "7")],
)
def test_a_part_where_slurm_does_not_answer(variables: dict[str, str], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The advice names the part alone, too."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    for variable, value in variables.items():
        monkeypatch.setenv(f"SLURM_{variable}", value)
    assert f"`scontrol requeue {name}`" in go_on_later(tmp_path, Config(), job(), 3, Ending("SIGUSR2", 0.0))


def test_a_job_that_slurm_queued_again_is_left_alone(slurm: FakeSlurm, tmp_path: Path) -> None:
    """After the grace time Slurm does it itself: asking again would end the new attempt."""
    slurm.shows(**REQUEUED)
    assert stopped(tmp_path).endswith("; job 7 is queued again.")
    assert slurm.requeued == []
    slurm.shows(**REQUEUED)
    stopped(tmp_path, restart_count=1)
    assert slurm.requeued == []


@pytest.mark.parametrize(
    ("record", "ending", "reason"),
    [
        ({}, Ending("cancelled (SIGTERM)", 0.0, is_cancelled=True), "cancelled jobs are not queued again"),
        (CANCELLED, PREEMPTION, "job 7 was cancelled meanwhile"),
        ({"batch": 0}, PREEMPTION, "job 7 has no batch script, Slurm cannot queue it again"),
        ({"requeue": 0}, PREEMPTION, "job 7 was submitted with --no-requeue"),
    ],
)
def test_a_job_that_must_not_or_cannot_be_queued_again(record: dict, ending: Ending, reason: str, slurm: FakeSlurm, tmp_path: Path) -> None:
    """It ends with the reason and with what to do by hand."""
    slurm.shows(**record)
    said = stopped(tmp_path, ending)
    assert said == f"{ending.why}: stopped after step 3; {reason}. To go on: `scontrol requeue 7`, or {AGAIN.format(tmp_path)}"
    assert slurm.requeued == []


def test_slurm_refuses(slurm: FakeSlurm, tmp_path: Path) -> None:
    """Its message is shown, with what to do by hand."""
    slurm.refuses("Requested operation is presently disabled for job 7")
    said = stopped(tmp_path)
    assert "; Requested operation is presently disabled for job 7. To go on: `scontrol requeue 7`, or " in said


def test_slurm_queued_it_itself(slurm: FakeSlurm, tmp_path: Path) -> None:
    """Also after many attempts without a step: it is told as it is, and Slurm is not asked again."""
    slurm.shows(restarts=9)
    for restart in range(5):
        assert stopped(tmp_path, first=3, last=3, restart_count=restart).endswith("; job 7 is queued again.")
    assert slurm.requeued == []


def test_request_that_was_done_and_not_answered(slurm: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the job is in the queue again, what scontrol said on a second try is no news."""

    def requeue(job_id: str) -> str:
        slurm.shows(restarts=1)
        return f"Job is pending execution for job {job_id}"

    monkeypatch.setattr("rlbatch.launch.shutdown.requeue.requeue_job", requeue)
    assert stopped(tmp_path).endswith("; job 7 is queued again.")


def test_a_node_without_scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job ends cleanly and says how to go on by hand."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("PATH", str(tmp_path))
    said = stopped(tmp_path)
    assert "; there is no scontrol on this node, or it does not answer. To go on: `scontrol requeue 7`, or " in said


def test_no_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no queue: the command is told."""
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert stopped(tmp_path) == f"preempted (SIGUSR2): stopped after step 3. To go on: {AGAIN.format(tmp_path)}"


def idle(run_dir: Path, restart_count: int, step: int) -> str:
    """An attempt without a new step."""
    return stopped(run_dir, first=step, last=step, restart_count=restart_count)


def in_start(run_dir: Path, restart_count: int, step: int) -> str:
    """An attempt that ended while it was loading, and does not know what it would have gone on from."""
    return go_on_later(run_dir, Config(), job(restart_count), None, PREEMPTION)


@pytest.mark.parametrize("attempt", [idle, in_start])
def test_a_job_that_gets_nowhere_ends(attempt: Callable[[Path, int, int], str], slurm: FakeSlurm, tmp_path: Path) -> None:
    """After launch.max_idle_requeues (3) requeues in a row without a new step it is not queued again, and says why. A step in between
    starts the count anew; so does a new job.
    """

    def attempts(restarts: Sequence[int], end: Callable[[int], str]) -> list[bool]:
        said = []
        for restart in restarts:
            slurm.shows(restarts=restart)
            said.append(end(restart))
        return [text.endswith("; job 7 is queued again.") for text in said]

    assert attempts([0], lambda restart: stopped(tmp_path, first=2, last=3)) == [True]
    assert attempts([1, 2], lambda restart: attempt(tmp_path, restart, 3)) == [True] * 2
    assert attempts([3], lambda restart: stopped(tmp_path, first=3, last=4, restart_count=3)) == [True]
    assert attempts([4, 5, 6], lambda restart: attempt(tmp_path, restart, 4)) == [True] * 3
    slurm.shows(restarts=7)
    said = attempt(tmp_path, 7, 4)
    assert "; launch.max_idle_requeues=3: not queued again, because 4 attempts in a row ended without a new step" in said
    assert len(slurm.requeued) == 7
    assert end_attempt(tmp_path, job(0, "8"), None, "preempted").idle_requeues() == 0
