"""Ranks that fail under a real Slurm: the job ends within seconds, names the rank once, and leaves nothing."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.cluster.faults import EVENT
from tests.cluster.jobs import RUN_S, TWO_RANKS, fault_reward, submit
from tests.cluster.processes import wait_until
from tests.cluster.slurm import Slurm
from tests.stopwatch import Stopwatch

LONG = pytest.mark.long("clusters", "jobs")
LIMIT_S = 8.0
"""Hang limit of generation and rewards."""
END_S = 15.0
"""From the event, or from the end of the hang limit, to the end of the last process."""
QUICK = ("train.steps=3", "checkpoint.save_interval=-1")


@pytest.mark.parametrize(
    ("what", "rank", "words"),
    [
        pytest.param("kill", 1, ["ended without a word ("], marks=LONG),
        pytest.param("kill", 0, ["ended without a word ("], marks=LONG),
        pytest.param("raise", 3, ["reward=fault", "ValueError", "this reward cannot be computed"], marks=LONG),
        pytest.param("exit", 2, ["ended without a word ("], marks=LONG),
        ("hang", 1, ["This rank is at tests/cluster/faults.py:", "Stacks of all ranks: logs/rank*.stacks"]),
    ],
    ids=["killed", "rank 0 killed", "raises", "exits with 0", "hangs"],
)
def test_a_failure_ends_the_job(what: str, rank: int, words: list[str], slurm: Slurm, repository: Path, tmp_path: Path) -> None:
    """Within 15 s no process is left; the exit code is 1, the log names rank and node exactly once, summary.json has the same error."""
    ranks = 2 if what == "hang" else 4  # on two nodes
    event, run_dir, host = tmp_path / "event", tmp_path / "run", slurm.nodes[2 * rank // ranks]
    slurm.environment[EVENT] = str(event)
    limit = [f"launch.generation_limit_s={LIMIT_S}"] if what == "hang" else []  # none for ranks that are only slow
    overrides = (*QUICK, *limit, *fault_reward(what, rank), *(TWO_RANKS if ranks == 2 else ()))
    job = submit(slurm, run_dir, *overrides, cwd=repository)
    wait_until(lambda: event.exists() or job.has_ended(), RUN_S, "the failure")
    assert event.exists(), job.log()
    watch, late_s = Stopwatch(), time.time() - float(event.read_text())
    wait_until(lambda: not slurm.job_processes(), RUN_S, f"the end of all processes: {job.log()}")
    watch.assert_within(END_S + (LIMIT_S if what == "hang" else 0.0) - late_s)
    fields = job.wait_for_end()
    assert (fields["JobState"], fields["ExitCode"]) == ("FAILED", "1:0")
    assert job.log().count(f"[rank {rank} host {host}]") == 1
    told = job.log().partition(f"[rank {rank} host {host}]")[2]
    assert [word for word in words if word not in told] == []
    summary = job.json("summary.json")
    assert summary["status"] == "failed"
    assert (summary["first_error"]["rank"], summary["first_error"]["host"]) == (rank, host)
    if what == "hang":
        stacks = {path.name: path.read_text() for path in (run_dir / "logs").glob("rank*.stacks")}
        assert sorted(stacks) == [f"rank{number}.stacks" for number in range(ranks)]
        assert "faults.py" in stacks[f"rank{rank}.stacks"]


@pytest.mark.parametrize(("code", "ranks", "told"), [(3, "1", "task 1: Exited with exit code 3"), (0, "01", "or all ended with 0")])
def test_ranks_that_end_before_our_code(code: int, ranks: str, told: str, slurm: Slurm, repository: Path, tmp_path: Path) -> None:
    """At import, as in a torn installation: the job has failed, whatever srun makes of it (143, 0), and srun's line names the rank."""
    condition = f"os.environ.get('SLURM_STEP_ID', '') == '0' and os.environ['SLURM_PROCID'] in '{ranks}'"
    (tmp_path / "sitecustomize.py").write_text(f"import os\nif {condition}:\n    os._exit({code})\n")
    slurm.environment["PYTHONPATH"] = str(tmp_path)
    try:
        job = submit(slurm, tmp_path / "run", *QUICK, *TWO_RANKS, cwd=repository)
        fields = job.wait_for_end()
    finally:
        del slurm.environment["PYTHONPATH"]
    assert (fields["JobState"], fields["ExitCode"]) == ("FAILED", "1:0")
    assert told in job.log()
