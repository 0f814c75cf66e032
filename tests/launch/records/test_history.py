"""The history of a run's attempts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlbatch.launch.records.history import ATTEMPTS, begin_attempt, end_attempt, read_history, record_write
from tests.launch.scontrol import job


def test_lives_follow_each_other(tmp_path: Path) -> None:
    """Each is added when it begins; one that ended without a word has no end."""
    begin_attempt(tmp_path, job(0), 0)
    end_attempt(tmp_path, job(0), 4, "preempted (SIGUSR2)")
    history = begin_attempt(tmp_path, job(1), 4)
    assert [
        (attempt.restart_count, attempt.first_step, attempt.last_step, attempt.why, attempt.ended > 0) for attempt in history.attempts
    ] == [
        (0, 0, 4, "preempted (SIGUSR2)", True),
        (1, 4, 0, "", False),
    ]
    assert read_history(tmp_path) == history


def test_lives_that_were_killed_count_as_idle(tmp_path: Path) -> None:
    """A requeue counts by what the next attempt goes on from, whether the last one could say something or not."""
    for restart, first in enumerate((0, 2, 2, 2)):
        history = begin_attempt(tmp_path, job(restart), first)
    assert history.idle_requeues() == 2
    assert begin_attempt(tmp_path, job(0, "9"), 2).idle_requeues() == 0


def test_an_end_in_the_middle_of_loading(tmp_path: Path) -> None:
    """The attempt did not know its first step: it would have gone on from the end of the one before."""
    begin_attempt(tmp_path, job(0), 0)
    end_attempt(tmp_path, job(0), 4, "preempted")
    history = end_attempt(tmp_path, job(1), None, "preempted")
    assert [(attempt.restart_count, attempt.first_step, attempt.last_step) for attempt in history.attempts] == [(0, 0, 4), (1, 4, 4)]
    assert history.is_idle()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"attempts": [{"x": 1}], "write_bytes": 0, "write_s": 0}', '{"attempts": 3}'])
def test_a_damaged_history_is_none(text: str, tmp_path: Path) -> None:
    """It is for estimates and counts only: the run goes on without it."""
    (tmp_path / ATTEMPTS).write_text(text)
    assert read_history(tmp_path).attempts == ()
    assert len(begin_attempt(tmp_path, job(), 3).attempts) == 1


def test_the_rate_of_the_last_checkpoint_is_kept(tmp_path: Path) -> None:
    """For the next estimate, beside the attempts."""
    begin_attempt(tmp_path, job(), 0)
    assert read_history(tmp_path).write_rate() == 0
    record_write(tmp_path, 10**9, 0.5)
    assert read_history(tmp_path).write_rate() == 2e9
    assert len(read_history(tmp_path).attempts) == 1


def test_history_of_an_earlier_version(tmp_path: Path) -> None:
    """A run that began when the file was called lives.json goes on with its history."""
    end_attempt(tmp_path, job(0), 4, "preempted (SIGUSR2)")
    content = json.loads((tmp_path / ATTEMPTS).read_text())
    (tmp_path / "lives.json").write_text(json.dumps({"lives" if key == "attempts" else key: value for key, value in content.items()}))
    (tmp_path / ATTEMPTS).unlink()
    history = begin_attempt(tmp_path, job(1), 4)
    assert [attempt.last_step for attempt in history.attempts] == [4, 0]
