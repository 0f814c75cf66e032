"""A step that advantage estimators are tried on."""

from __future__ import annotations

from dataclasses import dataclass

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
