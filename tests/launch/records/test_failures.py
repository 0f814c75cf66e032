"""The first failure of a job is recorded once."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from rlbatch.api import RewardError
from rlbatch.launch.records import failures
from rlbatch.launch.records.failures import (
    CLAIM_VARIABLE,
    FIRST_ERROR,
    FirstError,
    claim,
    has_failed,
    read_first_error,
    report_failure,
    reporting_failures,
)


def test_only_the_first_is_kept(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The first error is recorded and printed; later ones are neither."""
    assert report_failure(tmp_path, 3, RewardError("reward=x: raised"))
    assert not report_failure(tmp_path, 0, RuntimeError("connection closed"))
    first = read_first_error(tmp_path)
    assert first is not None
    assert (first.rank, first.type, first.message) == (3, "RewardError", "reward=x: raised")
    assert capfd.readouterr().err == f"[rank 3 host {first.host}] reward=x: raised\n"
    assert set(json.loads((tmp_path / FIRST_ERROR).read_text())) == {"rank", "host", "type", "message", "traceback", "time", "start"}
    assert [path.name for path in tmp_path.iterdir()] == [FIRST_ERROR]


def test_folder_that_cannot_be_written(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A full or lost disk takes the record, not the message; nothing else is raised."""
    assert report_failure(tmp_path / "gone", 3, RewardError("reward=x: raised"))
    assert "] reward=x: raised\n(This could not be written to " in capfd.readouterr().err


def test_the_first_is_the_first_where_nothing_can_be_written(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """That is kept in memory: one message, of one line, whether the folder is gone or the system's error is told by a library."""
    gone = tmp_path / "gone"
    assert report_failure(gone, 1, OSError(28, "No space left on device"))
    assert not report_failure(gone, 0, RuntimeError("connection closed"))
    [line] = capfd.readouterr().err.splitlines()
    assert f"] run_dir={gone}: was moved or removed. Leave it where it is while something runs in it, then start again. ([Errno 28]" in line
    other = tmp_path / "other"
    assert report_failure(other, 1, RuntimeError("PytorchStreamWriter: file write failed"))
    assert capfd.readouterr().err.count("\n") == 1


def test_processes_of_a_launcher_decide_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Who takes the byte was first, and is told alone."""
    reading, writing = os.pipe2(os.O_NONBLOCK)
    os.write(writing, b"!")
    monkeypatch.setenv(CLAIM_VARIABLE, str(reading))
    claimed = [report_failure(tmp_path / name, 0, RewardError("reward=x: raised")) for name in ("gone", "gone", "other")]
    assert claimed == [True, False, False]
    assert report_failure(tmp_path, 0, RewardError("where there is a record it decides"))
    told = capfd.readouterr().err
    assert "reward=x: raised" in told
    assert "it decides" not in told
    assert read_first_error(tmp_path) is not None


SLURM = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}
LATER = [
    ({"RLBATCH_LAUNCH": "one"}, {"RLBATCH_LAUNCH": "one"}, True),
    ({"RLBATCH_LAUNCH": "one"}, {"RLBATCH_LAUNCH": "two"}, False),
    (SLURM, SLURM | {"SLURM_RESTART_COUNT": "0"}, True),
    (SLURM, SLURM | {"SLURM_RESTART_COUNT": "1"}, False),
    (SLURM, SLURM | {"SLURM_STEP_ID": "1"}, False),
    ({}, {}, False),
]


@pytest.mark.parametrize(("one", "other", "is_same"), LATER)
def test_a_rank_that_begins_late_keeps_its_start_s_error(
    one: dict[str, str], other: dict[str, str], is_same: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a slow node: another rank may have failed minutes before. An earlier start's error of that time is none of this one's."""
    for name in (*SLURM, "SLURM_RESTART_COUNT", "RLBATCH_LAUNCH"):
        monkeypatch.delenv(name, raising=False)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in one.items():
            patch.setenv(name, value)
        claim(tmp_path, FirstError(1, "n2", "ConfigError", "before", "", time.time() - 86400))
    for name, value in other.items():
        monkeypatch.setenv(name, value)
    assert has_failed(tmp_path) == is_same


@pytest.mark.parametrize("text", ["", "{}", '{"rank": 1'])
def test_damaged_record(text: str, tmp_path: Path) -> None:
    """What a crash left half written stops neither the next start nor the list of jobs: it is older than any start."""
    (tmp_path / FIRST_ERROR).write_text(text)
    error = read_first_error(tmp_path)
    assert error is not None
    assert error.time == 0.0
    assert "is damaged" in str(error)


def test_rank_ends_with_code_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """A rank that raises ends with exit code 1; what is not for users keeps its traceback."""
    monkeypatch.setattr(failures, "PATIENCE_S", 0.0)
    with pytest.raises(SystemExit) as caught, reporting_failures(tmp_path, 0):
        raise KeyError("unforeseen")
    assert caught.value.code == 1
    assert "Traceback" in capfd.readouterr().err


def test_success_leaves_nothing(tmp_path: Path) -> None:
    """Without an error there is no record."""
    with reporting_failures(tmp_path, 0):
        pass
    assert read_first_error(tmp_path) is None


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def test_errors_without_a_text_and_with_a_long_one(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Whatever foreign code raises is recorded, in a bounded size."""
    for number, (error, told) in enumerate([(Mute(), "that raises RuntimeError"), (ValueError("x" * 10**6), "(1000000 characters)")]):
        folder = tmp_path / str(number)
        folder.mkdir()
        assert report_failure(folder, 3, error)
        first = read_first_error(folder)
        assert first is not None
        assert told in first.message
        assert len(capfd.readouterr().err) < 50_000
