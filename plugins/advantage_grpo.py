"""``grpo`` and ``dr_grpo``: a sample is compared with the other samples of its prompt."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rlbatch.api import AdvantageInputs, AdvantageSpec, hookimpl

if TYPE_CHECKING:
    from torch import Tensor

STD_EPS = 1e-6


def grpo(inputs: AdvantageInputs) -> Tensor:
    """``A_i = (r_i - mean(group)) / (std(group) + 1e-6)``, std with ddof 1 (Shao et al. 2024, arXiv 2402.03300, section 4.1.2).

    A group of one sample keeps its raw reward. A group of equal rewards gets exactly 0.

    Returns:
        [N] float64.
    """
    centred, group, sizes = _centred(inputs)
    squares = centred.new_zeros(len(sizes)).index_add(0, group, centred.square())
    std = (squares / (sizes - 1).clamp(min=1)).sqrt()
    normalised = centred / (std[group] + STD_EPS)
    return normalised.where(sizes[group] > 1, centred)


def dr_grpo(inputs: AdvantageInputs) -> Tensor:
    """``A_i = r_i - mean(group)``, without the std (Liu et al. 2025, arXiv 2503.20783).

    Dividing by the std gives more weight to prompts that are almost always or almost never solved.
    A group of one sample keeps its raw reward.

    Returns:
        [N] float64.
    """
    return _centred(inputs)[0]


def _centred(inputs: AdvantageInputs) -> tuple[Tensor, Tensor, Tensor]:
    """Rewards less their group's mean [N] float64, the group of each sample [N], and the size of each group."""
    rewards, group, sizes = inputs.in_groups()
    means = rewards.new_zeros(len(sizes)).index_add(0, group, rewards) / sizes
    return rewards - means.where(sizes > 1, 0.0)[group], group, sizes


@hookimpl
def rlbatch_register_advantage_estimators() -> Mapping[str, AdvantageSpec]:
    """Names of this module."""
    return {"grpo": AdvantageSpec(grpo, min_group_size=2), "dr_grpo": AdvantageSpec(dr_grpo, min_group_size=2)}
