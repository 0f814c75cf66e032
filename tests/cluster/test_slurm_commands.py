"""What people type around a job on a real Slurm: refusals when it is submitted, and `python -m rlbatch.jobs`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.jobs import TINY, WORLD, submit
from tests.cluster.slurm import Slurm

SUBMIT = (sys.executable, "-m", "rlbatch.submit", *WORLD, *TINY, "launcher=slurm")


def refused(slurm: Slurm, cwd: Path, *overrides: str) -> str:
    """What submit says when it starts nothing."""
    done = subprocess.run([*SUBMIT, *overrides], env=slurm.environment, cwd=cwd, text=True, capture_output=True, timeout=60)
    assert done.returncode == 2, done.stdout + done.stderr
    return done.stderr


@pytest.mark.parametrize(
    ("override", "start"),
    [
        ("cluster.partition=gold", "cluster.partition=gold: sbatch refused the job ("),
        ("cluster.constraint=h100", "cluster.constraint=h100: sbatch refused the job ("),
        ("cluster.sbatch_options=[--nonsense]", "cluster.sbatch_options=[--nonsense]: sbatch refused the job ("),
    ],
)
def test_sbatch_refuses(override: str, start: str, slurm: Slurm, repository: Path, tmp_path: Path) -> None:
    """sbatch's own message is shown, with the key to change; no run folder is left."""
    said = refused(slurm, repository, override, f"run_dir={tmp_path / 'run'}")
    assert said.startswith(start)
    assert not (tmp_path / "run").exists()


def test_two_jobs_on_one_run_folder(slurm: Slurm, repository: Path, tmp_path: Path) -> None:
    """The second is refused while the first one waits or runs, and names it."""
    job = submit(slurm, tmp_path / "run", "cluster.sbatch_options=[--hold]", cwd=repository)
    said = refused(slurm, repository, f"run_dir={tmp_path / 'run'}", "resume=auto")
    assert f"job {job.job_id} is PENDING in it" in said


def test_jobs(slurm: Slurm, repository: Path, tmp_path: Path) -> None:
    """Without accounting, too, jobs are listed and shown with their state, and cancelled."""
    job = submit(slurm, tmp_path / "run", "cluster.sbatch_options=[--hold]", cwd=repository)
    jobs = (sys.executable, "-m", "rlbatch.jobs")
    assert "PENDING" in next(line for line in slurm.run(*jobs).splitlines() if job.job_id in line.split())
    slurm.run(*jobs, "cancel", job.job_id)
    assert slurm.job(job.job_id)["JobState"] == "CANCELLED"
    assert "CANCELLED" in slurm.run(*jobs, "show", job.job_id)
