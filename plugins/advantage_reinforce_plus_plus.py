"""``reinforce_plus_plus`` and ``reinforce_plus_plus_baseline``: whitened over every token of the step (Hu 2025, arXiv 2501.03262)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from rlbatch.api import AdvantageEstimator, AdvantageInputs, AdvantageSpec, always, hookimpl
from rlbatch.api.values import Range, option

if TYPE_CHECKING:
    from torch import Tensor

VARIANCE_EPS = 1e-8


@dataclass(frozen=True)
class ReinforceOptions:
    """``algorithm.advantage_options.*`` of ``reinforce_plus_plus``."""

    gamma: Annotated[float, Range(least=0, most=1)] = option(1.0, "Discount of a reward for each sampled token before it.")


def build_reinforce_plus_plus(options: ReinforceOptions) -> AdvantageEstimator:
    """``A_t = whiten(R_t)``, ``R_t = r_t + gamma R_(t+1)`` over the sampled tokens of a sample.

    With gamma 1 and without a KL penalty in the reward every token of a sample has the sample's reward as its return. Returns [T] float64.
    """

    def reinforce_plus_plus(inputs: AdvantageInputs) -> Tensor:
        from torch import cat

        # Sample by sample: differences of sums over the whole step would have the rounding of its largest reward.
        samples = inputs.token_rewards.split(inputs.lengths.tolist())
        return _whiten(cat([_returns(rewards, options.gamma) for rewards in samples]))

    return reinforce_plus_plus


def _returns(rewards: Tensor, gamma: float) -> Tensor:
    """[R] ``sum_k gamma^k r_(t+k)``: sums over windows that double, so log2(R) operations and no quotient of powers."""
    returns, window = rewards.clone(), 1
    while window < len(rewards):
        returns[:-window] += gamma**window * returns[window:].clone()
        window *= 2
    return returns


def reinforce_plus_plus_baseline(inputs: AdvantageInputs) -> Tensor:
    """``A_t = whiten(r_i - mean(group))`` on each token t of sample i, so a long sample weighs more in the statistics.

    A group of one sample enters with its raw reward.

    Returns:
        [T] float64.
    """
    rewards, group, sizes = inputs.in_groups()
    means = rewards.new_zeros(len(sizes)).index_add(0, group, rewards) / sizes
    centred = rewards - means.where(sizes > 1, 0.0)[group]
    return _whiten(centred.repeat_interleave(inputs.lengths))


def _whiten(values: Tensor) -> Tensor:
    """``(x - mean) / sqrt(var + 1e-8)``, var with ddof 1; a single value becomes 0, and so do equal ones."""
    shifted = values - values[0]
    centred = shifted - shifted.mean()
    variance = centred.square().sum() / max(len(values) - 1, 1)
    return centred * (variance + VARIANCE_EPS).rsqrt()


@hookimpl
def rlbatch_register_advantage_estimators() -> Mapping[str, AdvantageEstimator | AdvantageSpec]:
    """Names of this module."""
    return {
        "reinforce_plus_plus": AdvantageSpec(build_reinforce_plus_plus, ReinforceOptions),
        "reinforce_plus_plus_baseline": AdvantageSpec(always(reinforce_plus_plus_baseline), min_group_size=2),
    }
