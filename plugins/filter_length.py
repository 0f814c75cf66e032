"""``length``: drops groups of long responses, or of many that were cut."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from rlbatch.api import Count, CountOrZero, FilterSpec, GroupFilter, SampleGroup, hookimpl
from rlbatch.api.values import Range, option


@dataclass(frozen=True)
class LengthOptions:
    """``sampling.filter_options.length.*``"""

    min_mean: CountOrZero = option(0, "Least mean of a group's response lengths, tokens.")
    max_mean: Count | None = option(None, "Most mean of a group's response lengths, tokens; null: no limit.")
    max_truncated: Annotated[float, Range(least=0, most=1)] = option(
        1.0, "Largest share of a group's responses that rollout.max_response_tokens cut, e.g. 0.5."
    )

    def __post_init__(self) -> None:
        if self.max_mean is not None and self.min_mean > self.max_mean:
            raise ValueError(f"min_mean ({self.min_mean}) must be at most max_mean ({self.max_mean})")


def build_length(options: LengthOptions) -> GroupFilter:
    """Keeps a group whose responses are neither too long nor too short on average, and of which not too many were cut."""

    def length(group: SampleGroup) -> bool:
        samples = group.samples
        mean = sum(sample.response_length for sample in samples) / len(samples)
        cut = sum(sample.finish_reason == "length" for sample in samples) / len(samples)
        is_short_enough = options.max_mean is None or mean <= options.max_mean
        return options.min_mean <= mean and is_short_enough and cut <= options.max_truncated

    return length


@hookimpl
def rlbatch_register_group_filters() -> Mapping[str, FilterSpec]:
    """Names of this module."""
    return {"length": FilterSpec(build_length, LengthOptions)}
