"""Decides whether a run may go on: not with values that are not finite, and not after many steps that teach nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rlbatch.api import ModelError, RewardError
from rlbatch.config.schema import TrainConfig


@dataclass
class Health:
    """Watches a run's steps, alike on every rank.

    Attributes:
        train: ``train.*``.
        announce: Told of what is passed over.
        skipped: Updates in a row that were passed over.
        silent: Steps in a row that count as teaching nothing.
        lowest_reward: Smallest mean reward of a step so far; -infinity: not known.
        was_told: Whether the last step's advantages were all 0, which was told.
    """

    train: TrainConfig
    announce: Callable[[str], None]
    skipped: int = 0
    silent: int = 0
    lowest_reward: float = math.inf
    was_told: bool = False

    def pass_over(self, what: str, updates: int = 1) -> None:
        """Takes note of updates that are not made, as their values are not finite.

        Args:
            what: Must be finite and is not, and whose fault that is, without a full stop.
            updates: How many.

        Raises:
            ModelError: with ``train.on_nonfinite=stop``, or after too many in a row.
        """
        fix = "Mend what gave that, lower optimizer.lr or scale the rewards, and go on from the last checkpoint"
        if self.train.on_nonfinite == "stop":
            raise ModelError(f"train.on_nonfinite=stop: {what}. {fix}; train.on_nonfinite=skip leaves such updates out.")
        self.skipped += updates
        if self.skipped > self.train.max_skipped_updates:
            raise ModelError(
                f"train.max_skipped_updates={self.train.max_skipped_updates}: {self.skipped} updates in a row were left out, the last: "
                f"{what}. {fix}."
            )
        self.announce(f"train.on_nonfinite=skip: {what}: left out")

    def updated(self) -> None:
        """Takes note of an update that was made."""
        self.skipped = 0

    def end_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Tells of a step whose advantages are all 0, and ends a run that learns nothing.

        Such a step counts if its mean reward is the lowest that the run has had. So a run that ends with the best reward for every sample
        goes on to its end; one with the same reward from its start, or that has lost what it had learned, does not.

        Raises:
            RewardError: ``train.max_steps_without_signal`` steps in a row counted.
        """
        if "reward/mean" not in metrics:  # the step had no groups, and that was told
            return
        mean, least, most = (metrics[f"reward/{name}"] for name in ("mean", "min", "max"))
        is_lowest, self.lowest_reward = mean <= self.lowest_reward, min(mean, self.lowest_reward)
        if metrics.get("advantage/abs_mean") != 0:
            self.silent, self.was_told = 0, False
            return
        self.silent = self.silent + 1 if is_lowest else 0
        limit = self.train.max_steps_without_signal
        why = f"all rewards are {least:.6g}" if least == most else f"the rewards of each prompt are equal ({least:.6g} to {most:.6g})"
        if limit and self.silent >= limit:
            raise RewardError(
                f"train.max_steps_without_signal={limit}: every advantage was 0 for {self.silent} steps in a row, and no reward better "
                f"than ever: in step {step} {why}. Mend the reward (see samples/), or take prompts that are sometimes solved; 0: no limit."
            )
        if is_lowest or not self.was_told:
            count = f" ({self.silent} of {limit} steps in a row)" if is_lowest and limit else ""
            self.announce(f"step {step}: every advantage is 0, {why}: nothing to learn from{count}")
        self.was_told = True

    def state(self) -> list[Any]:
        """What a resumed run goes on with, for JSON."""
        return [self.silent, self.lowest_reward if math.isfinite(self.lowest_reward) else None]

    def restore(self, state: Any) -> None:
        """``state`` of an earlier attempt; a checkpoint that has none is of a run that may have learned all that there was."""
        if isinstance(state, list) and len(state) == 2 and isinstance(state[0], int) and isinstance(state[1], (int, float)):
            self.silent, self.lowest_reward = state
        else:
            self.silent, self.lowest_reward = 0, -math.inf
