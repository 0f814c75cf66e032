"""Whole runs under a real Slurm: from a batch script, through submitit, and preempted; their results are the same to the bit."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests import tiny_models
from tests.cluster.faults import SLOW
from tests.cluster.jobs import RUN_S, START_S, TWO_RANKS, Job, fault_reward, sbatch, submit
from tests.cluster.processes import wait_until
from tests.cluster.slurm import Slurm
from tests.tiny_models import saved

STEPS = 12
STEP_S = 1.0
"""Slower than steps are, so that a job can be preempted in between; until it was."""
RUN = (f"train.steps={STEPS}", "checkpoint.export_hf=true", *fault_reward(seconds=STEP_S))
SCRIPT = "slurm/local_smoke.sbatch"

WRONG = """
from dataclasses import replace
from torch import distributed
from rlbatch.api import hookimpl
from rlbatch_plugins.model_qwen3_moe import qwen3_moe

failures = []

@hookimpl(tryfirst=True)
def rlbatch_resolve_model_family(hf_config):
    if distributed.is_initialized() and distributed.get_world_size() == 2 and distributed.get_rank() == 1 and not failures:
        failures.append(1)
        raise RuntimeError("one rank alone")
    return replace(qwen3_moe(hf_config), rotary_base=9000.0)
"""


def two_ranks(slurm: Slurm, repository: Path, folder: Path) -> Job:
    """The run by ``sbatch slurm/local_smoke.sbatch``, of one rank on each node."""
    return sbatch(slurm, repository / SCRIPT, folder, *RUN, *TWO_RANKS, options=["--ntasks-per-node=1"])


@pytest.fixture(scope="module")
def uninterrupted(slurm_session: Slurm, repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """What it leaves."""
    job = two_ranks(slurm_session, repository, tmp_path_factory.mktemp("smoke"))
    assert job.wait_for_end()["JobState"] == "COMPLETED", job.log()
    return job


def test_batch_script(uninterrupted: Job, slurm: Slurm) -> None:
    """The embedded run on two nodes comes to its end."""
    summary = uninterrupted.json("summary.json")
    assert (summary["status"], summary["steps"], summary["first_error"]) == ("finished", STEPS, None)
    assert {"model.safetensors", f"step_{STEPS:06}.jsonl"} <= uninterrupted.result().keys()


@pytest.mark.long("clusters", "jobs")
def test_submitit(slurm: Slurm, repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """submit's job gives the same weights and samples as the batch script's, on two nodes of two ranks, also where jobs do not get the
    environment of sbatch: what the script exports reaches the ranks. Its folder's name is no pattern.
    """
    script = sbatch(slurm, repository / SCRIPT, tmp_path, *RUN)
    assert script.wait_for_end()["JobState"] == "COMPLETED", script.log()
    monkeypatch.setitem(slurm.environment, "SBATCH_EXPORT", "NONE")
    job = submit(slurm, tmp_path / "top10%_x =1, 'a' %5x", *RUN, cwd=repository)
    assert job.wait_for_end()["JobState"] == "COMPLETED", job.log()
    assert job.result() == script.result()


TWICE = [pytest.param(way, 2, marks=pytest.mark.long("clusters", "jobs")) for way in ("sbatch", "submit")]


@pytest.mark.parametrize(("way", "times"), [("submit", 1), *TWICE])
def test_preempted(
    way: str, times: int, uninterrupted: Job, slurm: Slurm, repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that more urgent ones preempt saves, is queued again and goes on, also twice in a row: as if nothing had happened."""
    monkeypatch.setitem(slurm.environment, SLOW, str(tmp_path / "slow"))
    (tmp_path / "slow").touch()
    run = (*RUN, *TWO_RANKS)
    job = two_ranks(slurm, repository, tmp_path) if way == "sbatch" else submit(slurm, tmp_path / "run", *run, cwd=repository)
    for requeues in range(1, 1 + times):
        before = [attempt["last_step"] for attempt in job.json("attempts.json").get("attempts", [])]
        job.wait_for_step(max(before, default=0) + 2)
        slurm.run("sbatch", "--partition=urgent", "--nodes=4", "--exclusive", "--output=/dev/null", "--wrap=sleep 1")
        wait_until(lambda wanted=requeues: int(slurm.job(job.job_id)["Restarts"]) == wanted, START_S, f"requeue: {job.log()}")  # type: ignore[misc]
    (tmp_path / "slow").unlink()
    fields = job.wait_for_end()
    assert fields["JobState"] == "COMPLETED", job.log()
    assert fields["Restarts"] == str(times)
    attempts = job.json("attempts.json")["attempts"]
    assert [attempt["restart_count"] for attempt in attempts] == [*range(times + 1)]
    assert all("preempted" in attempt["why"] for attempt in attempts[:-1])
    ends, beginnings = ([attempt[name] for attempt in attempts] for name in ("last_step", "first_step"))
    assert ends[:-1] == beginnings[1:]
    assert 2 <= ends[0] < ends[-1] == STEPS
    assert ends == sorted(set(ends))
    assert job.json("summary.json")["status"] == "finished"
    assert job.result() == uninterrupted.result()


@pytest.mark.long("clusters", "align")
def test_a_comparison(slurm: Slurm, tmp_path: Path) -> None:
    """``rlbatch.align`` as a job on two nodes: a wrong rotary base is named under a layout of one rank, and over two pipeline stages.

    Between them is a layout of two ranks, of which one fails; it is named, and the others go on. An engine has its turn after them. Answers
    are in the log and in the run folder, with the page; what sides computed is gone. The command says that a side differs.
    """
    hf, run_dir = saved(tiny_models.qwen3_moe(), tmp_path / "model"), tmp_path / "run"
    (tmp_path / "wrong.py").write_text(WRONG)
    sides = [f"hf={hf}", "layouts=[ep1,ep2,tp2+pp2]", "engines=[transformers]", f"plugins=[{tmp_path / 'wrong.py'}]"]
    places = ["+cluster=local", "cluster.gpus_per_node=2", "launcher=slurm", "follow=true", f"run_dir={run_dir}"]
    command = [sys.executable, "-m", "rlbatch.align", *sides, *places]
    said = slurm.run("sh", "-c", '"$@"; echo exit code $?', "sh", *command, timeout_s=RUN_S)
    text = (run_dir / "align.txt").read_text()
    assert "exit code 1" in said, said
    assert text.count("Kind: rotary position: rotary base (theta) is about 9000, not 1e+04") == 2, said
    assert [line for line in text.splitlines() if line.startswith("trainer tp2+pp2 fp32: layer 0: attention's queries")]
    assert "trainer ep2 fp32: did not run: RankFailure: RuntimeError: one rank alone" in text
    assert "trainer tp2+pp2 fp32: gradients agree with those of trainer ep1 fp32" in text
    assert "transformers fp32: agrees everywhere up to rounding" in text
    assert text in said
    assert (run_dir / "align.html").read_text().count("<polyline") == 3
    assert not (run_dir / "values").exists()
    assert "COMPLETED" in said
