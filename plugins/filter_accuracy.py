"""``accuracy``: keeps groups whose mean reward is in a band: neither too hard nor too easy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import fsum
from typing import Annotated

from rlbatch.api import FilterSpec, GroupFilter, SampleGroup, hookimpl
from rlbatch.api.values import Range, option

Reward = Annotated[float, Range(least=-1e15, most=1e15)]


@dataclass(frozen=True)
class AccuracyOptions:
    """``sampling.filter_options.accuracy.*``"""

    low: Reward = option(0.0, "Lower bound of a group's mean reward, itself in the band.")
    high: Reward = option(1.0, "Upper bound of a group's mean reward, itself in the band.")

    def __post_init__(self) -> None:
        if self.low > self.high:
            raise ValueError(f"low ({self.low:g}) must be at most high ({self.high:g})")


def build_accuracy(options: AccuracyOptions) -> GroupFilter:
    """Keeps a group if ``low <= mean of its rewards <= high``; a prompt that is solved sometimes has e.g. low 0.2 and high 0.8."""

    def accuracy(group: SampleGroup) -> bool:
        return options.low <= fsum(group.rewards) / len(group.rewards) <= options.high

    return accuracy


@hookimpl
def rlbatch_register_group_filters() -> Mapping[str, FilterSpec]:
    """Names of this module."""
    return {"accuracy": FilterSpec(build_accuracy, AccuracyOptions)}
