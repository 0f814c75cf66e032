"""``rloo``: REINFORCE with the mean of the other samples as baseline."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rlbatch.api import AdvantageInputs, AdvantageSpec, always, hookimpl

if TYPE_CHECKING:
    from torch import Tensor


def rloo(inputs: AdvantageInputs) -> Tensor:
    """``A_i = r_i - mean of the group's other rewards`` (Ahmadian et al. 2024, arXiv 2402.14740).

    A group of one sample keeps its raw reward. Equal rewards give exactly 0.

    Returns:
        [N] float64.
    """
    rewards, group, sizes = inputs.in_groups()
    totals = rewards.new_zeros(len(sizes)).index_add(0, group, rewards)
    others: Tensor = (totals[group] - rewards) / (sizes[group] - 1).clamp(min=1)
    return rewards - others


@hookimpl
def rlbatch_register_advantage_estimators() -> Mapping[str, AdvantageSpec]:
    """Names of this module."""
    return {"rloo": AdvantageSpec(always(rloo), min_group_size=2)}
