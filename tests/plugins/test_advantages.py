"""What every built-in estimator keeps, whatever the scale of the rewards."""

from __future__ import annotations

import pytest
import torch

from rlbatch.algorithms.advantages import token_advantages
from rlbatch.api import AdvantageEstimator, PluginError
from rlbatch.config.schema import AlgorithmConfig
from tests.algorithms.loss_tables import registry
from tests.plugins.advantage_cases import Case

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
