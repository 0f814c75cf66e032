from __future__ import annotations

import pytest
import torch

from rlbatch.algorithms.advantages import advantage_inputs, token_advantages
from rlbatch.api import PluginError

REWARDS = torch.tensor([1.0, 0.0, 0.5])
GROUPS = torch.tensor([4, 4, 2])
LENGTHS = torch.tensor([2, 1, 3])


def test_the_reward_is_on_the_last_token() -> None:
    """Without a penalty the token rewards are the rewards, on the last token of each sample, and nothing is rounded."""
    inputs = advantage_inputs(REWARDS, GROUPS, LENGTHS)
    assert inputs.token_rewards.tolist() == [0, 1, 0, 0, 0, 0.5]
    assert torch.equal(inputs.rewards, REWARDS)


def test_the_kl_penalty_is_subtracted_once() -> None:
    """A sample's reward falls by coefficient x the sum of its KL, token by token, and both views of the reward agree."""
    kl = torch.tensor([0.1, 0.2, 0.4, -0.1, 0.0, 0.3])
    inputs = advantage_inputs(REWARDS, GROUPS, LENGTHS, kl, kl_reward_coef=0.5)
    torch.testing.assert_close(inputs.token_rewards, torch.tensor([-0.05, 0.9, -0.2, 0.05, 0.0, 0.35]))
    torch.testing.assert_close(inputs.rewards, torch.tensor([0.85, -0.2, 0.4]))
    assert torch.equal(REWARDS, torch.tensor([1.0, 0.0, 0.5]))


def test_an_answer_a_sample_is_given_to_each_token() -> None:
    """[N] is repeated over response tokens, [T] is taken as it is, both as float32."""
    inputs = advantage_inputs(REWARDS, GROUPS, LENGTHS)
    assert token_advantages("own", lambda i: i.rewards.double(), inputs).tolist() == [1, 1, 0, 0.5, 0.5, 0.5]
    per_token = token_advantages("own", lambda i: i.token_rewards.double(), inputs)
    assert torch.equal(per_token, inputs.token_rewards)


def test_a_wrong_shape_is_refused() -> None:
    """An estimator that returns another shape is named, with both shapes that fit."""
    with pytest.raises(PluginError, match=r"algorithm\.advantage=own: returned shape \[2\] .* Return \[3\] or \[6\]\."):
        token_advantages("own", lambda i: i.rewards[:2], advantage_inputs(REWARDS, GROUPS, LENGTHS))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_refused(value: float) -> None:
    """An estimator that returns NaN or infinity stops the job instead of the model."""
    with pytest.raises(PluginError, match=r"algorithm\.advantage=own: 1 of 3 advantages are not finite"):
        token_advantages(
            "own", lambda i: i.rewards / torch.tensor([1, 1, 0.5]) * torch.tensor([1, 1, value]), advantage_inputs(REWARDS, GROUPS, LENGTHS)
        )
