from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from rlbatch_plugins.advantage_reinforce_plus_plus import ReinforceOptions, build_reinforce_plus_plus
from tests.plugins.advantage_cases import Case

reinforce_plus_plus = build_reinforce_plus_plus(ReinforceOptions())


def whiten(tokens: np.ndarray) -> np.ndarray:
    return (tokens - tokens.mean()) / np.sqrt(tokens.var(ddof=1) + 1e-8)


def test_returns_sum_token_rewards_to_the_end_of_the_sample() -> None:
    """With rewards on every token, a return is the sum from its token to the end of its own sample, not of the next."""
    case = Case([0.3, 2.0, -1.0, 0.7, 0.9, 5.0], [1, 3, 2], [4, 1, 2, 3, 6, 2])
    rewards = np.random.default_rng(1).normal(size=sum(case.lengths))
    samples = np.split(rewards, np.cumsum(case.lengths)[:-1])
    expected = whiten(np.concatenate([sample[::-1].cumsum()[::-1] for sample in samples]))
    inputs = dataclasses.replace(case.inputs(), token_rewards=torch.tensor(rewards))
    np.testing.assert_allclose(reinforce_plus_plus(inputs).numpy(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("gamma", [0.0, 0.5, 0.95, 1.0])
def test_returns_are_discounted_by_token(gamma: float) -> None:
    """A reward k tokens on counts gamma^k, whatever the length of the sample."""
    case = Case([0.3, 2.0, -1.0, 0.7], [2, 2], [33, 1, 2, 64])
    rewards = np.random.default_rng(2).normal(size=sum(case.lengths))
    returns = rewards.copy()
    for sample in np.split(returns, np.cumsum(case.lengths)[:-1]):
        for token in range(len(sample) - 2, -1, -1):
            sample[token] += gamma * sample[token + 1]
    inputs = dataclasses.replace(case.inputs(), token_rewards=torch.tensor(rewards))
    got = build_reinforce_plus_plus(ReinforceOptions(gamma))(inputs)
    np.testing.assert_allclose(got.numpy(), whiten(returns), rtol=1e-12, atol=1e-12)


def test_one_token_in_the_step_is_not_nan() -> None:
    """A step of a single token has no variance: its advantage is 0."""
    assert reinforce_plus_plus(Case([3.0], [1], [1]).inputs()).tolist() == [0.0]
