"""`trackers=[tensorboard]`."""

import math
from pathlib import Path

from rlbatch.api import NoOptions, TrackerContext
from rlbatch_plugins.tracker_tensorboard import TensorBoard


def opened(run_dir: Path, done: int = 0) -> TensorBoard:
    return TensorBoard(TrackerContext(run_dir, "id", "run", {}, done), NoOptions())


def read(run_dir: Path, tag: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir / "tensorboard"))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]


def test_scalars_are_readable_and_nan_is_kept(tmp_path: Path) -> None:
    """What was recorded can be read back by tag and step; NaN is a visible value, not a crash."""
    board = opened(tmp_path)
    board.record(0, {"reward/eval": 0.125})
    board.record(1, {"reward/mean": 0.25, "train/loss": math.nan})
    board.record(2, {"reward/mean": 0.5, "train/loss": math.inf})
    board.close("finished")
    assert read(tmp_path, "reward/mean") == [(1, 0.25), (2, 0.5)]
    assert read(tmp_path, "reward/eval") == [(0, 0.125)]
    (_, nan), (_, infinite) = read(tmp_path, "train/loss")
    assert math.isnan(nan) and infinite == math.inf


def test_steps_that_are_done_again_are_shown_once(tmp_path: Path) -> None:
    """A run that goes on after step 1 hides what its earlier attempt wrote of later steps, also of those that it never reaches."""
    first = opened(tmp_path)
    for number in (0, 1, 2, 3):
        first.record(number, {"reward/mean": 1.0})  # not closed: it was killed
    again = opened(tmp_path, 1)
    again.record(2, {"reward/mean": 2.0})
    again.close("failed")
    assert read(tmp_path, "reward/mean") == [(0, 1.0), (1, 1.0), (2, 2.0)]
