"""``reward_spread``: keeps groups whose rewards differ, as DAPO's dynamic sampling does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import pstdev
from typing import Annotated

from rlbatch.api import FilterSpec, GroupFilter, SampleGroup, hookimpl
from rlbatch.api.values import Range, option


@dataclass(frozen=True)
class SpreadOptions:
    """``sampling.filter_options.reward_spread.*``"""

    min_std: Annotated[float, Range(least=0, most=1e15)] = option(
        0.0, "Standard deviation of a group's rewards (over all its samples) that is not enough; 0: they must differ."
    )


def build_reward_spread(options: SpreadOptions) -> GroupFilter:
    """Keeps a group whose rewards have a standard deviation above ``min_std``.

    Yu et al. 2025 (arXiv 2503.14476, section 3.2): where all responses are right, or all wrong, the advantages of a group are 0. slime and
    verl compare with 1e-6 and the like; here the deviation of equal rewards is exactly 0.
    """

    def reward_spread(group: SampleGroup) -> bool:
        return len(set(group.rewards)) > 1 and pstdev(group.rewards) > options.min_std

    return reward_spread


@hookimpl
def rlbatch_register_group_filters() -> Mapping[str, FilterSpec]:
    """Names of this module."""
    return {"reward_spread": FilterSpec(build_reward_spread, SpreadOptions, min_group_size=2)}
