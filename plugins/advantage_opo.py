"""``opo``: the baseline of least variance, the length-weighted mean of the group's rewards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rlbatch.api import AdvantageInputs, AdvantageSpec, always, hookimpl

if TYPE_CHECKING:
    from torch import Tensor


def opo(inputs: AdvantageInputs) -> Tensor:
    """``A_i = r_i - sum(L_j r_j) / sum(L_j)`` over the group, L the response tokens (Hao et al. 2025, arXiv 2505.23585).

    A group of one sample keeps its raw reward. Equal rewards give exactly 0.

    Returns:
        [N] float64.
    """
    rewards, group, sizes = inputs.in_groups()
    lengths = inputs.lengths.double()
    zeros = rewards.new_zeros(len(sizes))
    baselines = zeros.index_add(0, group, lengths * rewards) / zeros.index_add(0, group, lengths)
    return rewards - baselines.where(sizes > 1, 0.0)[group]


@hookimpl
def rlbatch_register_advantage_estimators() -> Mapping[str, AdvantageSpec]:
    """Names of this module."""
    return {"opo": AdvantageSpec(always(opo), min_group_size=2)}
