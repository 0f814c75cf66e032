"""One object logs a run, on rank 0 only."""

import io
import json
import re
from pathlib import Path

import pytest

from rlbatch.api import ConfigError, StepResult
from rlbatch.metrics.report import Status, Summary
from rlbatch.metrics.run_log import RunLog, finished_line


def log_a_run(run_dir: Path, rank: int, status: Status = "failed") -> str:
    stream = io.StringIO()
    log = RunLog(run_dir, 1, rank, stream)
    log.phase("loading")
    log.record(StepResult(1, 1, {"reward/mean": 0.5}))
    log.samples(1, [b'{"reward": 0.5}'])
    log.finish(status, {"message": "broken"} if status == "failed" else None)
    return stream.getvalue()


def test_rank_0_fills_the_run_folder(tmp_path: Path) -> None:
    """Summary and samples exist, progress was shown, and the end is recorded."""
    shown = log_a_run(tmp_path, rank=0)
    assert shown.startswith("loading\nstep 1/1  reward 0.50")
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["status"], summary["reward_end"], summary["first_error"]) == ("failed", 0.5, {"message": "broken"})
    assert json.loads((tmp_path / "samples" / "step_000001.jsonl").read_text()) == {"reward": 0.5}


def test_a_run_that_is_done_says_so(tmp_path: Path) -> None:
    """In its last line, with its time, last rewards and folder; a run that ended otherwise has other last words."""
    last = rf"finished in \d+s: reward 0\.50; {tmp_path}"
    assert re.fullmatch(last, log_a_run(tmp_path, rank=0, status="finished").splitlines()[-1])
    assert finished_line(Summary(seconds=123.0, reward_end=1.0, eval_reward=0.996), Path("runs/a")) == (
        "finished in 2m03s: reward 1.00, eval 1.00; runs/a"
    )
    assert finished_line(Summary(seconds=3.0), Path("runs/a")) == "finished in 3s; runs/a"
    readme = finished_line(Summary(seconds=162.0, reward_end=0.999, eval_reward=1.0), Path("/home/you/rlbatch/runs/seed0"))
    assert f"\n{readme}\n```\n" in (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    for status in ("failed", "interrupted"):
        assert "finished in" not in log_a_run(tmp_path, rank=0, status=status)


def test_other_ranks_are_silent(tmp_path: Path) -> None:
    """The same calls on another rank write no file and show nothing."""
    assert log_a_run(tmp_path, rank=1) == ""
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_written_is_told_in_one_line(tmp_path: Path) -> None:
    """As on a full disk: samples, metrics and the run's beginning are errors with the folder, and a failure's own words stay the last."""
    log = RunLog(tmp_path, steps=2, rank=0, stream=io.StringIO())
    (tmp_path / "summary.json.part").mkdir()
    (tmp_path / "samples").touch()
    for act, what in (
        (lambda: log.begin(0), "what a run tells of itself"),
        (lambda: log.samples(1, [b'{"step": 1}']), "samples"),
        (lambda: log.record(StepResult(1, 1, {})), "metrics"),
        (lambda: log.measure(1, {}), "metrics"),
    ):
        with pytest.raises(
            ConfigError, match=rf"^run_dir={tmp_path}: {what} cannot be written \(.+\)\. Free space, then go on with resume"
        ):
            act()
    log.failed({"message": "another"})
