"""`python -m rlbatch.jobs`."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from rlbatch.api import ConfigError
from rlbatch.jobs import main
from rlbatch.launch.jobs import JobRecord, index_path, new_record, read_jobs
from rlbatch.launch.ranks.rank_info import RankInfo
from rlbatch.launch.records.attempt import new_attempt, write_attempt
from rlbatch.launch.records.failures import FirstError, claim
from tests.fake_slurm import FakeSlurm


@pytest.fixture(autouse=True)
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return FakeSlurm(tmp_path / "slurm", monkeypatch, os.environ["PATH"])


def job(tmp_path: Path, job_id: str = "41", launcher: str = "slurm") -> JobRecord:
    run_dir = tmp_path / f"run{job_id}"
    (run_dir / "logs").mkdir(parents=True, exist_ok=True)
    return new_record(job_id, launcher, "rlbatch-run", run_dir, str(run_dir / "logs/job.log"))


def shown(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    assert main(arguments) == code
    said = capsys.readouterr()
    return said.err if code else said.out


def test_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """Without jobs it says so."""
    assert shown(capsys) == "No jobs were started from here.\n"


def test_list(slurm: FakeSlurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line a job, the newest last: state, nodes, run folder, first error in one line."""
    job(tmp_path, "40")
    record = job(tmp_path, "41")
    slurm.job("41", "FAILED", "1:0", NodeList="n[1-2]")
    claim(Path(record.run_dir), FirstError(3, "n2", "ValueError", "broken\nbadly", "", time.time()))
    capsys.readouterr()
    lines = shown(capsys).splitlines()
    assert lines[0].split() == ["JOB", "NAME", "STATE", "SUBMITTED", "NODES", "RUN", "FOLDER", "FIRST", "ERROR"]
    assert lines[1].startswith("40 ")
    assert lines[2].startswith("41 ")
    assert "FAILED (1)" in lines[2]
    assert lines[2].endswith(f"{record.run_dir}  [rank 3 host n2] broken badly")
    assert shown(capsys, "list").splitlines() == lines


def test_only_the_newest_and_only_what_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The list is short unless all is asked; a job whose run folder is gone is not in it, a requeued one once."""
    for number in range(30):
        job(tmp_path, str(number))
    job(tmp_path, "29")
    (tmp_path / "run28/job.json").unlink()
    (tmp_path / "run28/logs").rmdir()
    (tmp_path / "run28").rmdir()
    assert len(shown(capsys, "list").splitlines()) == 21
    assert len(shown(capsys, "list", "--all").splitlines()) == 30


def test_damaged_list(tmp_path: Path) -> None:
    """A half-written line, as two submits at once may leave, hides no job."""
    job(tmp_path)
    with index_path().open("a") as index:
        index.write('{"job_id": "9\n[1]\n')
    assert [record.job_id for record in read_jobs()] == ["41"]


def test_forgotten_job(slurm: FakeSlurm, tmp_path: Path) -> None:
    """What neither slurmctld nor the accounting knows any more ended as the run folder's summary says, if no other job was there since."""
    slurm.says("scontrol", rc=1)
    slurm.says("sacct", rc=1)
    record = job(tmp_path)
    (Path(record.run_dir) / "summary.json").write_text('{"status": "finished"}')
    assert (record.state().state, record.state().exit_code) == ("COMPLETED", 0)
    new_record("42", "slurm", "rlbatch-run", Path(record.run_dir), record.log)
    assert record.state().state == "UNKNOWN"


def test_waiting_job(slurm: FakeSlurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A job that waits says for what, so that one which can never start is seen."""
    job(tmp_path)
    slurm.job("41", "PENDING", Reason="PartitionNodeLimit")
    assert "PENDING (PartitionNodeLimit)" in shown(capsys)
    assert "state       PENDING (PartitionNodeLimit)\n" in shown(capsys, "show", "41")


def test_show(slurm: FakeSlurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One job, by its id or its run folder: state and reason, requeues, exit code, progress, first error with its traceback."""
    record = job(tmp_path)
    run_dir = Path(record.run_dir)
    slurm.job("41", "TIMEOUT", "0:15", NodeList="n1", Reason="TimeLimit", Restarts="2")
    (run_dir / "summary.json").write_text(json.dumps({"status": "failed", "steps": 7, "rewards": [0.5]}))
    claim(run_dir, FirstError(0, "n1", "ValueError", "broken", "Traceback ...\nValueError: broken", time.time()))
    capsys.readouterr()
    text = shown(capsys, "show", "41")
    for words in ("state       TIMEOUT (143) on n1 (TimeLimit)", "requeued    2 x", "exit code   143", "status failed, steps 7"):
        assert words in text
    assert "first error [rank 0 host n1] Traceback ...\nValueError: broken" in text
    assert shown(capsys, "show", str(run_dir)) == text


def test_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The merged log; before there is one, its state."""
    record = job(tmp_path)
    assert f"{record.log}: cannot be read (No such file or directory), the job is UNKNOWN." in shown(capsys, "log", "41", code=2)
    Path(record.log).write_text("step 1\n")
    assert shown(capsys, "log", "41") == "step 1\n"


def test_cancel(slurm: FakeSlurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A Slurm job is cancelled by Slurm; one that has ended is not said to be."""
    job(tmp_path)
    assert shown(capsys, "cancel", "41") == "job 41: asked to end\n"
    assert slurm.calls()[-1] == "scancel 41"
    slurm.job("41", "FAILED", "1:0")
    assert main(["cancel", "41"]) == 2
    assert capsys.readouterr().err == "job 41: has ended (FAILED). There is nothing to cancel.\n"
    assert slurm.calls().count("scancel 41") == 1


def test_cancel_a_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A job of mpirun is ended by SIGTERM to the process that waits for it; a pid that is somebody else's now is left alone."""
    waiting = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", "rlbatch"])
    other = subprocess.Popen(["sleep", "60"])
    try:
        record = job(tmp_path, f"pid{waiting.pid}", "mpi")
        deadline = time.monotonic() + 50
        while record.state().state != "RUNNING" and time.monotonic() < deadline:
            time.sleep(0.02)
        assert record.state().state == "RUNNING"
        assert shown(capsys, "cancel", record.job_id).endswith("asked to end\n")
        assert waiting.wait(50) == -15
        assert record.state().state == "UNKNOWN"
        (Path(record.run_dir) / "summary.json").write_text('{"status": "interrupted"}')
        assert (record.state().state, record.state().exit_code) == ("CANCELLED", 143)
        foreign = job(tmp_path, f"pid{other.pid}", "mpi")
        with pytest.raises(ConfigError, match="no process of"):
            foreign.cancel()
    finally:
        for process in (waiting, other):
            process.kill()
            process.wait()


def test_unknown_job(capsys: pytest.CaptureFixture[str]) -> None:
    """A job that was not started from here is refused in one line."""
    assert shown(capsys, "show", "999", code=2) == (
        "job 999: not started from here. `python -m rlbatch.jobs` lists the jobs; a run folder names its job too.\n"
    )


def test_a_run_that_was_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A run of this machine, which is in no list, is found by its folder; where all its processes are gone its summary is not believed."""
    monkeypatch.chdir(tmp_path)
    run_dir = tmp_path / "mine"
    run_dir.mkdir()
    dead = subprocess.Popen(["true"])
    dead.wait()
    attempt = new_attempt(RankInfo(0, 1, 0, 1, 0, socket.gethostname()), "", ["127.0.0.1"], 1)
    write_attempt(run_dir, replace(attempt, pid=dead.pid))
    (run_dir / "summary.json").write_text(json.dumps({"status": "running", "steps": 3}))
    said = shown(capsys, "show", "mine")
    assert f"job         pid{dead.pid} (mine), launcher local" in said
    assert "state       FAILED (1) (ended without a word)" in said
    assert "progress    status ended without a word, steps 3" in said
    (run_dir / "summary.json").write_text(json.dumps({"status": "finished", "steps": 3}))
    assert "state       COMPLETED" in shown(capsys, "show", "mine")
