"""Decides whether a run may go on: not with values that are not finite, and not after many steps without a learning signal."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rlbatch.api import ModelError, RewardError
from rlbatch.config.schema import TrainConfig


@dataclass
class Health:
    """Watches the steps of a run, equally on every rank.

    Attributes:
        train: Options ``train.*``.
        announce: Called with messages about skipped updates and steps.
        skipped: Number of consecutive updates that were skipped.
        silent: Number of consecutive steps that count as without a learning signal.
        lowest_reward: Lowest mean reward of a step so far; -infinity if it is not known.
        was_told: Whether the last step had only zero advantages, which was announced.
    """

    train: TrainConfig
    announce: Callable[[str], None]
    skipped: int = 0
    silent: int = 0
    lowest_reward: float = math.inf
    was_told: bool = False

    def pass_over(self, what: str, updates: int = 1) -> None:
        """Records updates that are skipped because their values are not finite.

        Args:
            what: Text that names the value and its cause, without a full stop.
            updates: Number of skipped updates.

        Raises:
            ModelError: with ``train.on_nonfinite=stop``, or after too many consecutive ones.
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
        """Records an update that was made."""
        self.skipped = 0

    def end_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Announces a step whose advantages are all 0, and ends a run that learns nothing.

        Such a step counts if its mean reward is the lowest that the run has had. So a run that ends with the best reward for every sample
        goes on to its end; one with the same reward from its start, or that has lost what it had learned, does not.

        Raises:
            RewardError: ``train.max_steps_without_signal`` such steps were counted in a row.
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
            count = f" ({self.silent} in a row; train.max_steps_without_signal={limit} end the run)" if is_lowest and limit else ""
            self.announce(f"step {step}: every advantage is 0, {why}: nothing to learn from{count}")
        self.was_told = True

    def state(self) -> list[Any]:
        """State that a resumed run needs, for JSON."""
        return [self.silent, self.lowest_reward if math.isfinite(self.lowest_reward) else None]

    def restore(self, state: Any) -> None:
        """Restores the ``state`` of an earlier attempt. Without one, the run is taken as one that may have learned all it can."""
        if isinstance(state, list) and len(state) == 2 and isinstance(state[0], int) and isinstance(state[1], (int, float)):
            self.silent, self.lowest_reward = state
        else:
            self.silent, self.lowest_reward = 0, -math.inf
