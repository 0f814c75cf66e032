from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from rlbatch_plugins.advantage_reinforce_plus_plus import ReinforceOptions, build_reinforce_plus_plus, reinforce_plus_plus_baseline
from tests.plugins.advantage_cases import CASES, Case

reinforce_plus_plus = build_reinforce_plus_plus(ReinforceOptions())


def whiten(tokens: np.ndarray) -> np.ndarray:
    return (tokens - tokens.mean()) / np.sqrt(tokens.var(ddof=1) + 1e-8)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_returns_are_whitened_over_tokens(case: Case) -> None:
    """Without a penalty every token has its sample's reward as return; all tokens of the step are whitened together, with ddof 1."""
    expected = whiten(case.tokens(np.float64(case.rewards)))
    np.testing.assert_allclose(reinforce_plus_plus(case.inputs()).numpy(), expected, rtol=0, atol=1e-6)


def test_returns_sum_token_rewards_to_the_end_of_the_sample() -> None:
    """With rewards on every token, a return is the sum from its token to the end of its own sample, not of the next."""
    case = CASES["unequal_groups"]
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


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_baseline_centres_in_the_group_then_whitens(case: Case) -> None:
    """The group's mean is subtracted, one sample keeps its reward, then all tokens of the step are whitened together."""
    expected = whiten(case.tokens(case.by_group(lambda r, _: r - r.mean() if len(r) > 1 else r)))
    np.testing.assert_allclose(reinforce_plus_plus_baseline(case.inputs()).numpy(), expected, rtol=0, atol=1e-6)


def test_known_numbers() -> None:
    """The conventions do not move: literal values of one small step, first token of each sample."""
    case = CASES["two_groups"]
    first = np.cumsum(case.lengths) - case.lengths
    expected = [1.3414506, -0.8748591, -0.8748591, 1.3414506, 0.2332958, -0.3207817, -0.8748591, 1.3414506]
    np.testing.assert_allclose(reinforce_plus_plus(case.inputs()).numpy()[first], expected, rtol=0, atol=1e-6)
    expected = [1.2959882, -0.9553284, -0.9553284, 1.2959882, 0.3110372, -0.2517920, -0.8146211, 1.4366954]
    np.testing.assert_allclose(reinforce_plus_plus_baseline(case.inputs()).numpy()[first], expected, rtol=0, atol=1e-6)


def test_one_token_in_the_step_is_not_nan() -> None:
    """A step of a single token has no variance: its advantage is 0."""
    assert reinforce_plus_plus(Case([3.0], [1], [1]).inputs()).tolist() == [0.0]
