"""Whole jobs whose engines are lost. The engine is a fake (``tests.engines.fake_generator``), in a real host; what matters is the job."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from rlbatch.api.exit_codes import STOPPED
from tests.leftovers import processes_of
from tests.test_resume import SCORED, samples, scalars
from tests.test_run import QUICK, Ended, submit

PLUGIN = Path(__file__).parents[1] / "hosted_plugin.py"
STEPS = 3
RUN = (
    *QUICK,
    *SCORED,
    f"plugins=['{PLUGIN}']",
    "rollout=hosted",
    f"train.steps={STEPS}",
    "train.prompts_per_step=8",
    "train.eval_interval=1",
    "data.eval=embedded",
    "eval.sets.more.file=embedded",  # its prompts have the ids of the others
    "eval.sets.more.prompts=6",
    "checkpoint.save_interval=0",
    "rollout.max_logprob_diff=null",
    "rollout.bucket_mib=1",
    "offload=gradients",
)
ENDED_S = 60.0
"""Well above the seconds that it takes, far below the 600 s after which a collective gives up."""


def run(run_dir: Path, monkeypatch: pytest.MonkeyPatch, *faults: tuple[int, str, int, str], overrides: tuple[str, ...] = ()) -> Ended:
    """A run in which engines do what they are told to."""
    monkeypatch.setenv("RLBATCH_TEST_FAULTS", json.dumps(faults))
    monkeypatch.setenv("PYTHONPATH", str(PLUGIN.parents[1]))
    ended = submit(run_dir, *RUN, *overrides)
    assert processes_of(run_dir) == []
    return ended


def state(run_dir: Path) -> dict[str, bytes]:
    """Weights and optimizer state at the end."""
    folder = run_dir / "checkpoints" / f"step_{STEPS:06d}" / "state"
    return {path.name: path.read_bytes() for path in folder.glob("*.distcp")}


def evaluations(run_dir: Path) -> dict[str, bytes]:
    return {path.relative_to(run_dir).as_posix(): path.read_bytes() for path in run_dir.glob("evaluations/*/*.jsonl")}


def restarts(ended: Ended) -> list[str]:
    return re.findall(r"engine (\d) was lost \((.*)\), restarted in \d+\.\d s, restart (\d of \d)", ended.stdout)


def reached(run_dir: Path, engine: int, place: str) -> int:
    return (run_dir / "engines" / str(engine) / f"reached_{place}").stat().st_size


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("undisturbed") / "run"
    with pytest.MonkeyPatch.context() as monkeypatch:
        ended = run(run_dir, monkeypatch)
    assert (ended.code, ended.stderr) == (0, "")
    assert restarts(ended) == []
    return run_dir


def assert_same(run_dir: Path, undisturbed: Path) -> None:
    assert len(samples(run_dir)) == STEPS
    assert samples(run_dir) == samples(undisturbed)
    assert scalars(run_dir) == scalars(undisturbed)
    assert state(run_dir) == state(undisturbed)
    assert evaluations(run_dir) == evaluations(undisturbed)
    assert len(evaluations(run_dir)) == 2 * (STEPS + 1)


def test_lost_engines_change_nothing(undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed in the middle of a generation, of an evaluation and of a sync, and while it is restarted; stopped; dead by its own word: every
    time it is announced, started anew, and samples what is missing. Samples, metrics and weights are those of an undisturbed run.
    """
    ended = run(
        tmp_path / "run",
        monkeypatch,
        (0, "answer", 4, "SIGKILL"),  # in the first evaluation, when it has all its answers of one set and one of the other
        (0, "group", 2, "SIGKILL"),
        (1, "group", 3, "dead"),
        (1, "start", 3, "SIGKILL"),  # when it is started after the next one
        (1, "load", 5, "SIGKILL"),
        (0, "group", 8, "SIGSTOP"),
        overrides=("rollout.options.hang_limit_s=8", "rollout.options.max_restarts=4"),
    )
    assert (ended.code, ended.stderr) == (0, "")
    found = restarts(ended)
    assert [(engine, number) for engine, _, number in found if engine == "0"] == [("0", f"{n} of 4") for n in (1, 2, 3)]
    assert [(engine, number) for engine, _, number in found if engine == "1"] == [("1", "1 of 4"), ("1", "3 of 4")]
    reasons = " ".join(reason for _, reason, _ in found)
    for reason in ("ended by SIGKILL", "the engine is dead (`generate`: it is told to dead)", "`generate`: no sign of life for 8 s"):
        assert reason in reasons
    assert scalars(tmp_path / "run", without=("time/", "perf/", "memory/", "plan_vs_actual/"))["rollout/engine_restarts"][-1][1] >= 5
    assert scalars(tmp_path / "run", without=())["time/restart_s"]  # of their own, so that they do not count as syncs
    assert "time/restart_s" not in scalars(undisturbed, without=())
    assert reached(tmp_path / "run", 0, "start") == 4
    logs = {path.name for path in (tmp_path / "run/engines/0").glob("*.log")}
    assert logs == {"engine.log", "engine_1.log", "engine_2.log", "engine_3.log"}
    assert_same(tmp_path / "run", undisturbed)


@pytest.mark.long("jobs")
def test_a_step_in_rounds_that_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamic sampling: engines are lost in and between the rounds of a step, and the job is stopped in a later round of the next one,
    whose finished groups are sampled, or found, again. It ends as one that nothing happened to, with the same groups waiting.
    """
    rounds = ("sampling.filters=[reward_spread]", "sampling.filter_options.reward_spread.min_std=0.13", "checkpoint.save_interval=1")
    assert run(tmp_path / "undisturbed", monkeypatch, overrides=rounds).code == 0
    curves = scalars(tmp_path / "undisturbed")
    assert all(number > 1 for _, number in curves["sampling/rounds"]), curves["sampling/rounds"]
    groups = reached(tmp_path / "undisturbed", 0, "group")
    faults = [(0, "group", 2, "SIGKILL"), (1, "group", 5, "dead"), (0, "group", groups - 1, "stop the job")]
    ended = run(tmp_path / "run", monkeypatch, *faults, overrides=(*rounds, "resume=auto"))
    assert (ended.code, ended.stderr, len(restarts(ended))) == (STOPPED, "", 2)
    ended = run(tmp_path / "run", monkeypatch, overrides=(*rounds, "resume=auto"))
    assert (ended.code, ended.stderr) == (0, "")
    assert_same(tmp_path / "run", tmp_path / "undisturbed")


def test_ranks_that_share_an_engine(undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine of two ranks is lost in a sync, in which the other rank takes part, and in a generation, of which it knows nothing. Nor
    does it change anything that the trainer's weights were away.
    """
    ended = run(
        tmp_path / "run",
        monkeypatch,
        (0, "load", 2, "SIGKILL"),
        (0, "group", 3, "SIGKILL"),
        overrides=("rollout.options.gpus_per_engine=2", "offload=weights"),
    )
    assert (ended.code, ended.stderr) == (0, "")
    assert [number for _, _, number in restarts(ended)] == ["1 of 3", "2 of 3"]
    assert samples(tmp_path / "run") == samples(undisturbed)
    assert state(tmp_path / "run") == state(undisturbed)


@pytest.mark.long("jobs")
def test_too_many_losses_end_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After max_restarts the job ends: once, with rank, host, key, and the last lines of the engine's log."""
    faults = [(1, "group", number, "SIGKILL") for number in (1, 2)]
    ended = run(tmp_path / "run", monkeypatch, *faults, overrides=("rollout.options.max_restarts=1",))
    assert ended.code == 1
    assert len(restarts(ended)) == 1
    assert re.search(
        r"^\[rank 1 host \S+\] rollout\.options\.max_restarts=1: engine 1 was lost 2 times\. rollout=hosted: the engine's ", ended.stderr
    )
    assert ended.stderr.count("SIGKILL at group 2") == 1
    assert ended.json("summary.json")["first_error"]["rank"] == 1


@pytest.mark.long("jobs")
def test_an_ordinary_error_restarts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the engine refuses it would refuse again: the job ends at once, also a rank that shares the engine, and is in the middle of the
    sync; what was refused is in the first line of both ranks' output.
    """
    ended = run(tmp_path / "run", monkeypatch, (0, "load", 3, "refuse"), overrides=("rollout.options.gpus_per_engine=2",))
    ended_s = max(path.stat().st_mtime for path in (tmp_path / "run/logs").iterdir())
    assert ended.code == 1
    refusal = r"\[rank 0 host \S+\] rollout=hosted: `load_weights` failed: it is told to refuse\n"
    assert re.match(refusal, ended.stderr)
    assert re.match(rf"The job has failed: {refusal}", (tmp_path / "run/logs/rank1.log").read_text())
    assert "in send" in (tmp_path / "run/logs/rank1.stacks").read_text()
    assert ended_s - (tmp_path / "run/engines/0/reached_load").stat().st_mtime < ENDED_S
    assert reached(tmp_path / "run", 0, "start") == 1
    assert restarts(ended) == []


@pytest.mark.long("jobs")
def test_a_job_that_is_stopped_during_a_restart(undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The restart hangs, and the rank gets SIGTERM: the job ends cleanly, and its next attempt ends as an undisturbed run."""
    faults = [(0, "group", 6, "SIGKILL"), (0, "start", 2, "stop the job")]
    ended = run(tmp_path / "run", monkeypatch, *faults, overrides=("resume=auto",))
    assert (ended.code, ended.stderr) == (STOPPED, "")
    assert "stopped after step 1" in ended.stdout
    ended = run(tmp_path / "run", monkeypatch, overrides=("resume=auto",))
    assert (ended.code, ended.stderr) == (0, "")
    assert "resumed after step 1" in ended.stdout
    assert_same(tmp_path / "run", undisturbed)
