"""Steps that every advantage estimator is tried on, and a per-group float64 reference for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rlbatch.api import AdvantageInputs


@dataclass(frozen=True)
class Case:
    """``sizes`` are the samples of each group."""

    rewards: list[float]
    sizes: list[int]
    lengths: list[int]

    def inputs(self) -> AdvantageInputs:
        """As the step builds them, without a KL penalty."""
        rewards, lengths = torch.tensor(self.rewards, dtype=torch.float64), torch.tensor(self.lengths)
        token_rewards = torch.zeros(sum(self.lengths), dtype=torch.float64)
        token_rewards[lengths.cumsum(0) - 1] = rewards
        # Ids that do not start at 0, are not consecutive and not sorted.
        ids = torch.tensor([(97 - 7 * index) for index in range(len(self.sizes))])
        return AdvantageInputs(rewards, ids.repeat_interleave(torch.tensor(self.sizes)), lengths, token_rewards, lengths < 0)

    def by_group(self, advantages: Callable[[Any, Any], Any]) -> np.ndarray:
        """[N] ``advantages(rewards, lengths)`` of each group, in float64."""
        rewards = np.float64(self.rewards)
        lengths = np.float64(self.lengths)
        ends = np.cumsum(self.sizes)
        return np.concatenate(
            [advantages(rewards[end - size : end], lengths[end - size : end]) for end, size in zip(ends, self.sizes, strict=True)]
        )

    def tokens(self, per_sample: np.ndarray) -> np.ndarray:
        """[T] from [N]."""
        return np.repeat(per_sample, self.lengths)


_random = np.random.default_rng(0)
_sizes = [5, 1, 8, 2, 3]

CASES = {
    "two_groups": Case([1, 0, 0, 1, 0.5, 0.25, 0, 1], [4, 4], [3, 1, 4, 2, 2, 2, 4, 1]),
    "one_group_all_equal": Case([0.1, 0.1, 0.1, 0, 0, 1], [3, 3], [2, 3, 1, 5, 1, 2]),
    "unequal_groups": Case([0.3, 2.0, -1.0, 0.7, 0.9, 5.0], [1, 3, 2], [4, 1, 2, 3, 6, 2]),
    "all_zero": Case([0, 0, 0, 0], [2, 2], [1, 2, 3, 4]),
    "random": Case(_random.normal(size=sum(_sizes)).tolist(), _sizes, _random.integers(1, 9, size=sum(_sizes)).tolist()),
}
