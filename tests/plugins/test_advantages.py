"""Every built-in estimator against its formula in NumPy, and what each keeps whatever the scale of the rewards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from rlbatch.algorithms.advantages import token_advantages
from rlbatch.api import AdvantageEstimator, PluginError
from rlbatch.config.schema import AlgorithmConfig
from tests.algorithms.loss_tables import advantages_named, estimator_inputs, registry
from tests.plugins.advantage_cases import Case

Group = np.ndarray


def centred(r: Group, lengths: Group) -> Group:
    return r - r.mean() if len(r) > 1 else r


def normalised(r: Group, lengths: Group) -> Group:
    return (r - r.mean()) / (r.std(ddof=1) + 0.01) if len(r) > 1 else r / 1.01


def others(r: Group, lengths: Group) -> Group:
    return np.array([r[i] - np.delete(r, i).mean() for i in range(len(r))]) if len(r) > 1 else r


def weighted(r: Group, lengths: Group) -> Group:
    return r - (lengths * r).sum() / lengths.sum() if len(r) > 1 else r


def relative(r: Group, lengths: Group) -> Group:
    return (r - r.mean()) / r.mean() if len(r) > 1 and r.mean() > 0 else np.zeros(len(r))


def kept(values: Group, rewards: Group) -> Group:
    return values


def whitened(values: Group, rewards: Group) -> Group:
    return (values - values.mean()) / np.sqrt(values.var(ddof=1) + 1e-8)


def over_step(values: Group, rewards: Group) -> Group:
    return values / (rewards.std(ddof=1) + 0.01)


FORMULAS: list[tuple[str, dict[str, Any], Callable[[Group, Group], Group], Callable[[Group, Group], Group]]] = [
    ("grpo", {"eps": 0.01}, normalised, kept),
    ("grpo", {"eps": 0.01, "std": "batch"}, centred, over_step),
    ("dr_grpo", {}, centred, kept),
    ("rloo", {}, others, kept),
    ("opo", {}, weighted, kept),
    ("maxrl", {}, relative, kept),
    ("reinforce_plus_plus", {}, lambda r, lengths: r, whitened),
    ("reinforce_plus_plus_baseline", {}, centred, whitened),
]


def test_every_estimator_has_a_formula() -> None:
    """None of the built-in ones of rewards is left out."""
    assert {name for name, *_ in FORMULAS} == {name for name, entry in registry().advantages.items() if not entry.value.needs_reference}


@pytest.mark.parametrize(("name", "options", "of_group", "of_step"), FORMULAS, ids=[f"{name} {options}" for name, options, *_ in FORMULAS])
def test_advantages_follow_the_formula(
    name: str, options: dict[str, Any], of_group: Callable[[Group, Group], Group], of_step: Callable[[Group, Group], Group]
) -> None:
    """Per token; rows without a token are out of everything, and the order of the samples does not matter."""
    for seed in range(20):
        random = np.random.default_rng(seed)
        rows = int(random.integers(2, 14))
        mask = np.arange(6) < random.integers(0, 7, rows)[:, None]
        mask[0] = True
        groups, rewards = random.integers(0, 4, rows), random.choice([0.0, 0.0, 1.0, 0.25, -0.5], rows)
        lengths, ones = mask.sum(1), mask.any(1)
        samples = np.zeros(rows)
        for group in set(groups[ones]):
            members = ones & (groups == group)
            samples[members] = of_group(rewards[members], lengths[members].astype(float))
        if ones.sum() < 2 and of_step is not kept:
            continue
        tokens = (samples[:, None] * np.ones(6))[mask]
        expected = of_step(tokens, rewards[ones])
        got = advantages_named(name, estimator_inputs(mask.tolist(), groups.tolist(), rewards.tolist()), **options)
        np.testing.assert_allclose(got.numpy(), expected, rtol=1e-9, atol=1e-9)
        order = random.permutation(rows)
        moved = advantages_named(name, estimator_inputs(mask[order].tolist(), groups[order].tolist(), rewards[order].tolist()), **options)
        torch.testing.assert_close(moved.sort().values, got.sort().values, rtol=1e-12, atol=1e-12)


def test_a_mean_that_is_only_rounding_is_none() -> None:
    """Rewards that cancel out have a mean of 1e-17: divided by it they would be beyond all bounds."""
    inputs = estimator_inputs([[1]] * 3, [0, 0, 0], [0.3, -0.1, -0.2])
    assert advantages_named("maxrl", inputs).tolist() == [0, 0, 0]


def test_distillation_is_the_difference_of_both_models() -> None:
    """At each token, whatever the rewards."""
    inputs = estimator_inputs([[1, 1], [1, 0]], [0, 1], [5.0, -3.0])
    old, ref = torch.tensor([-1.0, -2.0, -3.0]).double(), torch.tensor([-1.5, -0.5, -3.0]).double()
    assert advantages_named("distill", replace(inputs, old_logprobs=old, ref_logprobs=ref)).tolist() == [-0.5, 1.5, 0.0]


ESTIMATORS: dict[str, AdvantageEstimator] = {
    name: registry().build_advantage(AlgorithmConfig(advantage=name))
    for name, entry in registry().advantages.items()
    if not entry.value.needs_reference
}
ESTIMATORS["grpo of the step's std"] = registry().build_advantage(AlgorithmConfig(advantage_options={"std": "batch"}))
every_estimator = pytest.mark.parametrize("estimator", ESTIMATORS.values(), ids=ESTIMATORS)


@every_estimator
@pytest.mark.parametrize("size", [2, 3, 7, 8, 16])
def test_equal_rewards_teach_nothing(estimator: AdvantageEstimator, size: int) -> None:
    """Equal rewards have advantages of exactly 0, though 0.1 and 1/3 have no exact binary form, and whatever the lengths."""
    for reward in (0.1, 1 / 3, 0.7, 3e38, -1e8 - 0.1):
        advantages = estimator(Case([reward] * size, [size], [1 + 3 * i % 5 for i in range(size)]).inputs())
        assert not advantages.any()
        assert advantages.dtype == torch.float64


@every_estimator
@pytest.mark.parametrize("common", [1e8, -1e8, 1e15])
def test_what_rewards_have_in_common_does_not_matter(estimator: AdvantageEstimator, common: float) -> None:
    """Rewards of 1e8, 1e8 + 1 and 1e8 + 2 differ as 0, 1 and 2 do, for all but one that divides by their mean."""
    if estimator is ESTIMATORS["maxrl"]:
        return
    rewards, lengths = [0.0, 1.0, 2.0, 5.0, 5.0, 7.0], [3, 1, 2, 2, 4, 1]
    small, large = (estimator(Case([r + c for r in rewards], [3, 3], lengths).inputs()) for c in (0.0, common))
    torch.testing.assert_close(large.float(), small.float())
    assert small.abs().max() > 0.4


@every_estimator
def test_large_rewards_are_only_scaled(estimator: AdvantageEstimator) -> None:
    """At the edge of float32 normalised advantages are those of small rewards, the others in proportion to them."""
    rewards, lengths = [0.0, 1.0, -1.0, 0.5, 0.25, 0.0], [3, 1, 2, 2, 4, 1]
    medium, large = (estimator(Case([r * scale for r in rewards], [3, 3], lengths).inputs()) for scale in (1e6, 1e38))
    scale = 1e32 if large.abs().max() > 100 else 1.0
    torch.testing.assert_close(large.double() / scale, medium.double(), rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_rewards_too_far_apart_are_to_be_scaled(name: str) -> None:
    """What float32 does not hold is the rewards' fault, not the estimator's."""
    try:
        token_advantages(name, ESTIMATORS[name], Case([3e38, -3e38, 0.0, 0.0], [2, 2], [1, 2, 3, 1]).inputs())
    except PluginError as error:
        assert str(error).endswith("Scale the rewards.")


@every_estimator
def test_a_large_reward_leaves_other_samples_alone(estimator: AdvantageEstimator) -> None:
    """Nothing of one sample's huge reward gets into the rewards of others by rounding: equal ones stay equal."""
    tokens = estimator(Case([1e20, 0.0, 0.1, 0.1, 0.1, 0.1], [2, 4], [1, 1, 2, 3, 1, 2]).inputs())
    assert len(set(tokens[2:].tolist())) == 1


@pytest.mark.parametrize("std", ["group", "batch"])
def test_without_an_eps(std: str) -> None:
    """Equal rewards and a sample that is alone are divided by nothing small, also where everything is equal."""
    estimator = registry().build_advantage(AlgorithmConfig(advantage_options={"eps": 0.0, "std": std}))
    assert estimator(Case([1.0, 1.0, 1.0], [2, 1], [1, 2, 3]).inputs()).tolist() == [0, 0, 1]
    assert estimator(Case([2.0], [1], [3]).inputs()).tolist() == [2]
