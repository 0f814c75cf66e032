"""Real runs that are asked to stop, and go on: the end is that of a run that was never interrupted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlbatch.api.exit_codes import STOPPED
from tests.leftovers import processes_of
from tests.test_resume import latest, progress, samples, scalars, tensors
from tests.test_run import TINY, Ended, submit

PLUGIN = Path(__file__).with_name("signalling_plugin.py")
STEPS = 6
RUN = (*TINY, f"train.steps={STEPS}", "optimizer.lr_schedule=linear", "train.eval_interval=3", "rollout.options.max_batch_size=2")
SIGNALLING = (
    f"plugins=['{PLUGIN}']",
    "rollout=signalling",
    "algorithm.loss=signalling",
    "rollout.max_logprob_diff=1e-4",
    "offload=gradients",  # which may change nothing, in whatever phase the signal comes: the uninterrupted run is without
)
SLEEP_S = 1000.0
"""Longer than any run may take: an engine that is not interrupted fails the test."""


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("uninterrupted") / "run"
    ended = submit(run_dir, *RUN)
    assert (ended.code, ended.stderr) == (0, "")
    assert list((run_dir / "groups").iterdir()) == []
    return run_dir


def attempt(run_dir: Path, monkeypatch: pytest.MonkeyPatch, *events: tuple[str, int, str], overrides: tuple[str, ...] = ()) -> Ended:
    """One attempt of the run, in which ranks signal themselves."""
    monkeypatch.setenv("RLBATCH_TEST_SIGNALS", json.dumps(events))
    monkeypatch.setenv("RLBATCH_TEST_SLEEP_S", str(SLEEP_S))
    return submit(run_dir, *RUN, *SIGNALLING, "resume=auto", *overrides)


def history(run_dir: Path) -> list[dict[str, Any]]:
    attempts: list[dict[str, Any]] = json.loads((run_dir / "attempts.json").read_text())["attempts"]
    return attempts


def assert_same(run_dir: Path, uninterrupted: Path) -> None:
    assert samples(run_dir) == samples(uninterrupted)
    assert len(samples(run_dir)) == STEPS
    assert scalars(run_dir) == scalars(uninterrupted)
    assert [step for step, _ in scalars(run_dir)["reward/eval"]] == [0, 3, 6]
    assert progress(run_dir) == progress(uninterrupted)
    assert tensors(run_dir) == tensors(uninterrupted)


def test_short_notices_twice_in_a_row(uninterrupted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A notice shorter than the step, to one rank of two, in generation: the engine is interrupted, the state after the last step is saved,
    and the next attempt samples only what was not finished. Then one in the evaluation after a step: it is left to the next attempt.
    The end is bitwise that of a run that was not interrupted.
    """
    run_dir = tmp_path / "run"
    ended = attempt(run_dir, monkeypatch, ("generation 2 1", 1, "SIGUSR1"), overrides=("launch.notice_s=1",))
    assert (ended.code, ended.stderr) == (STOPPED, "")
    assert f"SIGUSR1: stopped after step 1. To go on: the command that started it, with run_dir={run_dir} resume=auto." in ended.stdout
    assert latest(run_dir) == "step_000001"
    assert sorted(samples(run_dir)) == ["step_000001.jsonl"]
    assert ended.json("summary.json")["status"] == "interrupted"
    kept = {path.name for path in (run_dir / "groups" / "step_000002").iterdir()}
    assert 1 <= len(kept) <= 3

    ended = attempt(run_dir, monkeypatch, ("evaluation 0", 0, "SIGTERM"))
    assert (ended.code, ended.stderr) == (STOPPED, "")
    assert "resumed after step 1" in ended.stdout
    assert "step 2: " in ended.stdout or len(kept) == 1
    assert latest(run_dir) == "step_000003"
    assert [step for step, _ in scalars(run_dir)["reward/eval"]] == [0]

    ended = attempt(run_dir, monkeypatch)
    assert (ended.code, ended.stderr) == (0, "")
    assert "evaluating after step 3" in ended.stdout
    assert_same(run_dir, uninterrupted)
    attempts = history(run_dir)
    assert [(entry["first_step"], entry["last_step"], entry["why"]) for entry in attempts[:2]] == [(0, 1, "SIGUSR1"), (1, 3, "SIGTERM")]
    assert list((run_dir / "groups").iterdir()) == []
    assert processes_of(run_dir) == []


def test_a_notice_while_the_weights_move(uninterrupted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the update the step is finished first; while a checkpoint is written that is completed first; a rank that starts ends at once.
    The end is bitwise that of a run that was not interrupted.
    """
    run_dir = tmp_path / "run"
    ended = attempt(run_dir, monkeypatch, ("start", 0, "SIGTERM"), ("start", 1, "SIGTERM"))
    assert ended.code != 0
    assert not (run_dir / "checkpoints").exists()

    ended = attempt(run_dir, monkeypatch, ("update 1", 0, "SIGUSR2"), overrides=("launch.notice_s=1",))
    assert (ended.code, ended.stderr) == (STOPPED, "")
    assert latest(run_dir) == "step_000002"

    ended = attempt(run_dir, monkeypatch, ("save 4", 0, "SIGTERM"), overrides=("checkpoint.save_interval=4",))
    assert ended.code == STOPPED
    assert ended.stderr.startswith("SIGTERM: all ranks ended.")
    assert latest(run_dir) == "step_000004"
    assert "stopped after step 4" in ended.stdout

    ended = attempt(run_dir, monkeypatch)
    assert (ended.code, ended.stderr) == (0, "")
    assert "resumed after step 4" in ended.stdout
    assert_same(run_dir, uninterrupted)
