"""`trackers=[jsonl]`."""

import json
import math
from pathlib import Path
from typing import Any

from rlbatch.api import NoOptions, TrackerContext
from rlbatch_plugins.tracker_jsonl import JsonLines


def opened(run_dir: Path, done: int = 0) -> JsonLines:
    return JsonLines(TrackerContext(run_dir, "id", "run", {}, done), NoOptions())


def read(run_dir: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if key != "time"} for row in rows]


def test_lines_are_there_at_once(tmp_path: Path) -> None:
    """Without a close, as of a run that is killed; what is not finite is null."""
    opened(tmp_path).record(1, {"reward/mean": 0.5, "train/loss": math.nan})
    assert read(tmp_path) == [{"step": 1, "reward/mean": 0.5, "train/loss": None}]


def test_steps_that_are_done_again_have_one_line(tmp_path: Path) -> None:
    """Later ones are removed, and so is a line that a kill cut; a run from the start begins a new file."""
    first = opened(tmp_path)
    for step in range(3):
        first.record(step, {"reward/mean": float(step)})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 0, "re')
    again = opened(tmp_path, 1)
    again.record(2, {"reward/mean": 9.0})
    again.close("finished")
    assert [(row["step"], row["reward/mean"]) for row in read(tmp_path)] == [(0, 0.0), (1, 1.0), (2, 9.0)]
    opened(tmp_path).record(1, {})
    assert read(tmp_path) == [{"step": 1}]
