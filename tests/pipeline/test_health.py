"""A run ends where it would go on with values that are not finite, or learn nothing; not where it has learned all."""

from __future__ import annotations

import json

import pytest

from rlbatch.api import ModelError, RewardError
from rlbatch.config.schema import TrainConfig
from rlbatch.pipeline.health import Health


def guard(**train: object) -> tuple[Health, list[str]]:
    told: list[str] = []
    return Health(TrainConfig(**train), told.append), told


def step(reward: float, spread: float = 0.0, signal: bool = False) -> dict[str, float]:
    metrics = {"reward/mean": reward, "reward/min": reward - spread, "reward/max": reward + spread}
    return metrics | {"advantage/abs_mean": 0.5 if signal else 0.0}


def silent_steps(watching: Health, reward: float, count: int, first: int = 1) -> None:
    for number in range(first, first + count):
        watching.end_step(number, step(reward))


def test_a_reward_that_never_differs_ends_the_run() -> None:
    """From the start, whatever the constant: each step is told with its number in the row, the last is an error."""
    for reward in (0.0, 1.0, -3.5):
        watching, told = guard(max_steps_without_signal=3)
        silent_steps(watching, reward, 2)
        count = "2 in a row; train.max_steps_without_signal=3 end the run"
        assert told[-1] == f"step 2: every advantage is 0, all rewards are {reward:.6g}: nothing to learn from ({count})"
        with pytest.raises(RewardError, match=r"^train\.max_steps_without_signal=3: every advantage was 0 for 3 steps in a row"):
            watching.end_step(3, step(reward))


def test_a_run_that_has_learned_goes_on() -> None:
    """The best reward everywhere, for the rest of the run, is no fault; it is told once."""
    watching, told = guard(max_steps_without_signal=3)
    watching.end_step(1, step(0.1, signal=True))
    silent_steps(watching, 1.0, 50, first=2)
    assert told == ["step 2: every advantage is 0, all rewards are 1: nothing to learn from"]


def test_a_run_that_falls_back_for_good_ends() -> None:
    """What it had learned is lost: the reward is no better than it ever was."""
    watching, _ = guard(max_steps_without_signal=3)
    for number, reward in enumerate((0.1, 0.6, 0.9), start=1):
        watching.end_step(number, step(reward, signal=True))
    with pytest.raises(RewardError):
        silent_steps(watching, 0.0, 3, first=4)


def test_only_steps_in_a_row_count() -> None:
    """A single step with a signal begins the count anew; prompts that differ from each other are told as such; 0 is no limit."""
    watching, told = guard(max_steps_without_signal=3)
    for number in range(1, 20, 3):
        silent_steps(watching, 0.0, 2, first=number)
        watching.end_step(number + 2, step(0.01, signal=True))
    watching.end_step(30, step(0.0, spread=1.0))
    assert told[-1] == (
        "step 30: every advantage is 0, the rewards of each prompt are equal (-1 to 1): nothing to learn from "
        "(1 in a row; train.max_steps_without_signal=3 end the run)"
    )
    silent_steps(guard(max_steps_without_signal=0)[0], 0.0, 100)


def test_what_a_resumed_run_knows() -> None:
    """The count and the lowest reward go through a checkpoint; one without them is of a run that may have learned all."""
    watching, _ = guard(max_steps_without_signal=3)
    silent_steps(watching, 0.0, 2)
    resumed, _ = guard(max_steps_without_signal=3)
    resumed.restore(json.loads(json.dumps(watching.state())))
    with pytest.raises(RewardError):
        resumed.end_step(3, step(0.0))
    for state in (None, [1], ["a", 1], [3, None]):
        unknown, _ = guard(max_steps_without_signal=3)
        unknown.restore(state)
        silent_steps(unknown, 1.0, 20)


def test_not_finite_stops_or_is_left_out_for_a_while() -> None:
    """stop: at once. skip: told, up to so many in a row; an update that is made begins the count anew."""
    with pytest.raises(ModelError, match=r"^train\.on_nonfinite=stop: update 3 must be finite: x has loss nan\. "):
        guard()[0].pass_over("update 3 must be finite: x has loss nan")
    watching, told = guard(on_nonfinite="skip", max_skipped_updates=2)
    for _ in range(3):
        watching.pass_over("one")
        watching.pass_over("two")
        watching.updated()
    assert told[:2] == ["train.on_nonfinite=skip: one: left out", "train.on_nonfinite=skip: two: left out"]
    watching.pass_over("log-probs", updates=2)
    with pytest.raises(ModelError, match=r"^train\.max_skipped_updates=2: 3 updates in a row were left out, the last: three\. "):
        watching.pass_over("three")
