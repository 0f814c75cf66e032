"""``maxrl``: rewards relative to how often the prompt is solved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rlbatch.api import AdvantageInputs, AdvantageSpec, always, hookimpl

if TYPE_CHECKING:
    from torch import Tensor

ROUNDING = 1e-12


def maxrl(inputs: AdvantageInputs) -> Tensor:
    """``A_i = (r_i - mean(group)) / mean(group)``; 0 where the mean is not positive (MaxRL, as prime-rl has it).

    Hard prompts weigh more: with rewards of 0 and 1 a success among n samples with k successes has the advantage ``n / k - 1``. A group of
    one sample gets 0.

    Returns:
        [N] float64.
    """
    shifted, group, sizes = inputs.in_groups()

    def means(values: Tensor) -> Tensor:
        return (values.new_zeros(len(sizes)).index_add(0, group, values) / sizes)[group]

    centred, mean = shifted - means(shifted), means(inputs.rewards)
    # A mean that is only what rounding left of rewards that cancel out is none.
    is_positive = mean > ROUNDING * means(inputs.rewards.abs())
    return (centred / mean).where(is_positive & (sizes[group] > 1), 0.0)


@hookimpl
def rlbatch_register_advantage_estimators() -> Mapping[str, AdvantageSpec]:
    """Names of this module."""
    return {"maxrl": AdvantageSpec(always(maxrl), min_group_size=2)}
