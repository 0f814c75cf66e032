"""`launcher=slurm`: what is handed to sbatch, what is told, what is refused; with programs that stand in for Slurm's."""

from __future__ import annotations

import json
import os
import pickle
import stat
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import rlbatch.launch.jobs
import rlbatch.submit
from rlbatch.config.compose import load_config
from rlbatch.launch.jobs import read_jobs
from tests.fake_slurm import FakeSlurm

LOCAL = ["+cluster=local", "launcher=slurm", "layout.world_size=4"]


@pytest.fixture(autouse=True)
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    """Works in an empty folder; sbatch accepts everything as job 41."""
    fake = FakeSlurm(tmp_path / "slurm", monkeypatch, os.environ["PATH"])
    fake.says("sbatch", "Submitted batch job 41\n")
    fake.job("41", "COMPLETED")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.chdir(tmp_path)
    return fake


def test_submitted(slurm: FakeSlurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The run folder, a private folder with script and pickled task, and what to do next."""
    slurm.job("41", "PENDING", Reason="Resources")
    assert rlbatch.submit.main([*LOCAL, "run_dir=mine"]) == 0
    run_dir = tmp_path / "mine"
    out = capsys.readouterr().out
    for words in (
        "Submitted job 41 (rlbatch-run): PENDING (Resources)\n",
        f"run folder  {run_dir}",
        f"{run_dir}/logs/job.log",
        "python -m rlbatch.jobs log 41 --follow",
        "python -m rlbatch.jobs cancel 41",
    ):
        assert words in out
    assert stat.S_IMODE((run_dir / "submitit").stat().st_mode) == 0o700
    script = (run_dir / "submitit/41_submission.sh").read_text()
    assert "#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=2\n" in script
    assert f"-u -m submitit.core._submit {run_dir}/submitit && code=0 || code=$?\n" in script
    assert (run_dir / "submitit/41_submitted.pkl").is_file()
    assert load_config(run_dir / "config.yaml").layout.world_size == 4
    assert (run_dir / "logs").is_dir()
    assert [call.split()[0] for call in slurm.calls()] == ["sbatch", "scontrol"]


def test_the_task_runs_the_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What every rank unpickles calls rlbatch.run with the run folder, in its own process."""
    import rlbatch.run

    assert rlbatch.submit.main([*LOCAL, "run_dir=mine"]) == 0
    started: list[Path] = []
    monkeypatch.setattr(rlbatch.run, "run_process", started.append)
    task = pickle.loads((tmp_path / "mine/submitit/41_submitted.pkl").read_bytes())
    task.function(*task.args, **task.kwargs)
    assert started == [tmp_path / "mine"]
    assert not hasattr(task.function, "checkpoint")  # requeueing is ours


def test_submitted_from_a_job(slurm: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From within another job sbatch does not get what would make srun fail, or ranks believe that they were requeued."""
    program = tmp_path / "slurm/bin/sbatch"
    program.write_text(program.read_text().replace("#!/bin/sh\n", f"#!/bin/sh\nenv > {tmp_path}/given\n"))
    inherited = {
        "SBATCH_ARRAY_INX": "0-3",
        "SLURM_JOB_ID": "7",
        "SLURM_MEM_PER_CPU": "4096",
        "SLURM_RESTART_COUNT": "1",
        "SLURMD_NODENAME": "n1",
    }
    kept = {"SLURM_CONF": "/etc/slurm.conf", "SBATCH_ACCOUNT": "rl", "MY_OWN": "1"}
    for name, value in (inherited | kept).items():
        monkeypatch.setenv(name, value)
    assert rlbatch.submit.main(LOCAL) == 0
    given = dict(line.split("=", 1) for line in (tmp_path / "given").read_text().splitlines() if "=" in line)
    assert not given.keys() & inherited.keys()
    assert given.items() >= kept.items()
    assert os.environ["SLURM_JOB_ID"] == "7"


def test_refused_by_sbatch(slurm: FakeSlurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """sbatch's message and the key to change, in one line; no new run folder and no job is left."""
    slurm.says("sbatch", err="sbatch: error: Batch job submission failed: Invalid partition name specified\n", rc=1)
    assert rlbatch.submit.main([*LOCAL, "cluster.partition=foo"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "cluster.partition=foo: sbatch refused the job (Batch job submission failed: Invalid partition name specified). "
        "Correct it; `sinfo -s` lists the partitions."
    ]
    assert not list((tmp_path / "runs").glob("*"))
    assert read_jobs() == []


def test_no_sbatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A machine without Slurm is told so, and how to look at what would run."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert rlbatch.submit.main(LOCAL) == 2
    assert capsys.readouterr().err == (
        "launcher=slurm: there is no sbatch on this machine. Submit from a login node of the cluster. "
        "Or see what would run, with dry_run=true.\n"
    )


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["layout.world_size=3"], "layout.world_size=3: must be a multiple of cluster.gpus_per_node (2)"),
        (["cluster.time_limit=00:02:00"], "cluster.time_limit=00:02:00: must be longer than 180 s of notice"),
        (["cluster.time_limit=soon"], "cluster.time_limit=soon: must be a time such as 90 (minutes)"),
        (
            ["cluster.container=pyxis", "cluster.container_image=a", "cluster.container_mounts=[/elsewhere:/elsewhere]"],
            "cluster.container_mounts=[/elsewhere:/elsewhere]: must show the run folder ",
        ),
        (["run_dir=back\\slash"], "run_dir="),
        (["run_dir=line\nbreak"], "run_dir="),
        (["run_dir=top10%train"], "run_dir="),
        (["model.name=a\\b"], "model.name=a\\b: must have no backslash and no control character, which sbatch cannot be told."),
        (["layout.ep_size=3"], "layout.ep_size=3: must divide num_experts (4)"),
        (["offload=cpu_adam"], "offload=cpu_adam: needs GPUs"),
    ],
)
def test_refused_before_sbatch(
    slurm: FakeSlurm, tmp_path: Path, capsys: pytest.CaptureFixture[str], overrides: list[str], message: str
) -> None:
    """What cannot be right is one line; sbatch is not asked, and nothing is left."""
    assert rlbatch.submit.main([*LOCAL, *overrides]) == 2
    assert capsys.readouterr().err.startswith(message)
    assert slurm.calls() == []
    assert not list((tmp_path / "runs").glob("*"))


def test_run_folder_of_a_job_that_runs(slurm: FakeSlurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """While a job waits or runs in a folder, no other is submitted there; afterwards it may go on."""
    assert rlbatch.submit.main([*LOCAL, "run_dir=mine"]) == 0
    slurm.job("41", "PENDING")
    before = (tmp_path / "mine/config.yaml").read_text()
    assert rlbatch.submit.main([*LOCAL, "run_dir=mine", "resume=auto", "seed=5"]) == 2
    assert "job 41 is PENDING in it. Wait for its end, end it with `python -m rlbatch.jobs cancel 41`" in capsys.readouterr().err
    assert (tmp_path / "mine/config.yaml").read_text() == before
    slurm.job("41", "FAILED", "1:0")
    assert rlbatch.submit.main([*LOCAL, "run_dir=mine", "resume=auto"]) == 0


@pytest.mark.parametrize(("state", "exit_code", "code"), [("COMPLETED", "0:0", 0), ("FAILED", "3:0", 3)])
def test_followed_to_the_end(
    slurm: FakeSlurm,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    state: str,
    exit_code: str,
    code: int,
) -> None:
    """follow=true shows the merged log, the state's changes, and ends with the job's exit code."""
    slurm.job("41", "RUNNING", NodeList="n[1-2]")
    monkeypatch.setattr(rlbatch.launch.jobs, "STATE_POLL_S", 0.2)
    monkeypatch.setattr(rlbatch.launch.jobs, "LOG_POLL_S", 0.05)
    lines = iter(["step 1\n", "step 2\n"])

    def sleep(seconds: float) -> None:
        line = next(lines, "")
        with (tmp_path / "mine/logs/job.log").open("a") as log:
            log.write(line)
        if not line:
            slurm.job("41", state, exit_code)

    # Of that module alone: threads that other tests left behind sleep too.
    monkeypatch.setattr(rlbatch.launch.jobs, "time", SimpleNamespace(**{**vars(time), "sleep": sleep}))
    assert rlbatch.submit.main([*LOCAL, "run_dir=mine", "follow=true"]) == code
    said = capsys.readouterr()
    assert said.out.endswith("step 1\nstep 2\n")
    assert said.err.splitlines() == ["job 41: RUNNING on n[1-2]", f"job 41: {state}"]


def test_record_in_the_run_folder(tmp_path: Path) -> None:
    """job.json and the list of jobs name the same job."""
    assert rlbatch.submit.main([*LOCAL, "run_dir=mine"]) == 0
    record = json.loads((tmp_path / "mine/job.json").read_text())
    assert (record["job_id"], record["launcher"], record["run_dir"]) == ("41", "slurm", str(tmp_path / "mine"))
    [listed] = read_jobs()
    assert listed.job_id == "41"


def test_relative_paths_in_a_container(slurm: FakeSlurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is typed from here is found by ranks, which work in the run folder of a container: from the root, and mounted."""
    (tmp_path / "my_reward.py").write_text(REWARD)
    for line in ("{}", '{"prompt": "a", "label": "b"}'):
        (tmp_path / "train.jsonl").write_text(f"{line}\n" * 64)
    job = [
        "data.train=train.jsonl",
        "data.eval=",
        "plugins=[my_reward.py]",
        "reward=mine",
        "run_dir=runs/1",
        "reward.options.table=./t.txt",
    ]
    pyxis = ["cluster.container=pyxis", "cluster.container_image=a"]
    (tmp_path / "t.txt").write_text("")
    assert rlbatch.submit.main([*LOCAL, *job, *pyxis, f"cluster.container_mounts=['{tmp_path}/runs:{tmp_path}/runs']"]) == 2
    assert capsys.readouterr().err == (
        f"cluster.container_mounts=[{tmp_path}/runs:{tmp_path}/runs]: must show plugins {tmp_path}/my_reward.py, "
        f"data.train {tmp_path}/train.jsonl, reward.options.table {tmp_path}/t.txt under the same path inside. "
        f"Add {tmp_path}:{tmp_path}, or folders above.\n"
    )
    assert rlbatch.submit.main([*LOCAL, *job, *pyxis, f"cluster.container_mounts=['{tmp_path}:{tmp_path}']"]) == 0
    config = load_config(tmp_path / "runs/1/config.yaml")
    assert (config.data.train, config.plugins) == (f"{tmp_path}/train.jsonl", (f"{tmp_path}/my_reward.py",))
    assert config.reward.options == {"table": f"{tmp_path}/t.txt"}


@pytest.mark.parametrize(("container", "launcher"), [("pyxis", "local"), ("pyxis", "mpi"), ("apptainer", "local")])
def test_containers_that_nobody_starts(container: str, launcher: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A container that would be left out without a word is refused."""
    job = [f"cluster.container={container}", "cluster.container_image=a", f"cluster.container_mounts=['{tmp_path}:{tmp_path}']"]
    assert rlbatch.submit.main(["+cluster=local", f"launcher={launcher}", "dry_run=true", *job]) == 2
    assert f"cluster.container={container}: launcher={launcher} does not start it." in capsys.readouterr().err


REWARD = """\
from dataclasses import dataclass

from rlbatch.api import Configurable, hookimpl


@dataclass(frozen=True)
class Options:
    table: str = ""


@hookimpl
def rlbatch_register_rewards():
    return {"mine": Configurable(lambda options: lambda samples: [0.0 for _ in samples], Options)}
"""
