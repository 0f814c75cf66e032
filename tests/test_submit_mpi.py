"""`launcher=mpi`: a real process tree, started by a program that stands in for mpirun."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

import rlbatch.submit
from rlbatch.launch.jobs import read_jobs

MPIRUN = """#!/bin/sh
if [ "$1" = --version ]; then echo 'mpirun (Open MPI) 5.0.11'; exit 0; fi
echo "$@" > {folder}/arguments
rm {folder}/mine/unfinished
exit {code}
"""


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)


def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int = 0) -> None:
    folder = tmp_path / "mpi"
    folder.mkdir()
    (folder / "mpirun").write_text(MPIRUN.format(folder=tmp_path, code=code))
    (folder / "mpirun").chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """The run folder with mpirun's own hostfile, the ranks' command, and a record of the job."""
    install(tmp_path, monkeypatch)
    (tmp_path / "hosts").write_text("n1 slot=2\nn2:2\n")
    overrides = ["+cluster=local", "launcher=mpi", "cluster.hostfile=hosts", "layout.world_size=4", "run_dir=mine"]
    assert rlbatch.submit.main(overrides) == 0
    assert f"Run folder: {tmp_path}/mine" in capfd.readouterr().out
    assert (tmp_path / "mine/hostfile").read_text() == "n1 slots=2\nn2 slots=2\n"
    assert (tmp_path / "arguments").read_text().strip().endswith(f"-m rlbatch.run --run-dir {tmp_path}/mine")
    [record] = read_jobs()
    assert (record.job_id, record.launcher) == (f"pid{os.getpid()}", "mpi")
    assert json.loads((tmp_path / "mine/job.json").read_text())["run_dir"] == str(tmp_path / "mine")


def test_ranks_that_ended_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """All with 0, as code may that runs in them before ours: that is no success."""
    install(tmp_path, monkeypatch)
    mpirun = tmp_path / "mpi/mpirun"
    mpirun.write_text(mpirun.read_text().replace("rm ", "# "))
    assert rlbatch.submit.main(["+cluster=local", "launcher=mpi", "run_dir=mine"]) == 1
    assert "all ranks ended with exit code 0 before the run did" in capfd.readouterr().err


def test_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """mpirun's failure is the job's."""
    install(tmp_path, monkeypatch, code=3)
    assert rlbatch.submit.main(["+cluster=local", "launcher=mpi", "run_dir=mine"]) == 1
    assert "mpirun ended with exit code 3" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("text", "ranks", "message"),
    [
        ("n1 slots=2\n", 4, "/hosts: has 2 slots on 1 hosts, fewer than layout.world_size (4)"),
        ("n1 slots=0\n", 4, "/hosts:1: slots=0: must be a number from 1 to 4096."),
        ("", 4, "/hosts:1: names no host."),
    ],
)
def test_refused_hostfiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], text: str, ranks: int, message: str
) -> None:
    """Bad lines and too few slots are refused before there is a run folder."""
    install(tmp_path, monkeypatch)
    (tmp_path / "hosts").write_text(text)
    assert rlbatch.submit.main(["+cluster=local", "launcher=mpi", "cluster.hostfile=hosts", f"layout.world_size={ranks}"]) == 2
    assert capfd.readouterr().err.removeprefix("cluster.hostfile=").startswith(f"{tmp_path}{message}")
    assert not (tmp_path / "runs").exists()


def test_unknown_interface(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """Where the ranks start on this machine, its interfaces are known."""
    install(tmp_path, monkeypatch)
    for launcher in ("mpi", "local"):
        assert rlbatch.submit.main(["+cluster=local", f"launcher={launcher}", "cluster.interface=bond7"]) == 2
        assert capfd.readouterr().err.startswith("cluster.interface=bond7: ")
