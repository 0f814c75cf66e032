"""TensorBoard gets every metric of every step."""

import math
from pathlib import Path

from rlbatch.api import StepResult
from rlbatch.metrics.tensorboard import TensorBoard


def test_scalars_are_readable_and_nan_is_kept(tmp_path: Path) -> None:
    """What was recorded can be read back by tag and step; NaN is a visible value, not a crash."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = TensorBoard(tmp_path / "tensorboard")
    board.record(StepResult(0, 0, {"reward/eval": 0.125}))
    board.record(StepResult(1, 1, {"reward/mean": 0.25, "train/loss": math.nan}))
    board.record(StepResult(2, 2, {"reward/mean": 0.5, "train/loss": math.inf}))
    board.close()

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {"reward/eval", "reward/mean", "train/loss"}
    assert [(event.step, event.value) for event in events.Scalars("reward/mean")] == [(1, 0.25), (2, 0.5)]
    assert [(event.step, event.value) for event in events.Scalars("reward/eval")] == [(0, 0.125)]
    nan, infinite = events.Scalars("train/loss")
    assert math.isnan(nan.value) and infinite.value == math.inf


def test_steps_that_are_done_again_are_shown_once(tmp_path: Path) -> None:
    """A run that goes on after step 1 hides what its earlier attempt wrote of later steps, also of those that it never reaches."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    first = TensorBoard(tmp_path)
    for number in (0, 1, 2, 3):
        first.record(StepResult(number, 0, {"reward/mean": 1.0}))  # not closed: it was killed
    again = TensorBoard(tmp_path)
    again.begin(1)
    again.record(StepResult(2, 0, {"reward/mean": 2.0}))
    again.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward/mean")] == [(0, 1.0), (1, 1.0), (2, 2.0)]
