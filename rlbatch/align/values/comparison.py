"""How far a side is from the baseline at every place, beside what rounding alone makes of the same model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlbatch.align.values.places import Place, Trace, in_order

TIMES_ROUNDING = 10.0
"""Other kernels add up in another order: a difference is one where it is that many times what rounding made in the baseline's."""
FLOOR = {"fp32": 2e-6, "bf16": 3e-2}
"""Relative differences that are rounding in any case: a few units in the last place of products of usual length."""
ABSOLUTE = ("logprobs", "entropy")
"""Places whose differences are nats; at others they are relative to the token's vector."""


@dataclass(frozen=True)
class Row:
    """One place.

    Attributes:
        place: Which.
        errors: [T] differences.
        limit: Most that rounding explains.
    """

    place: Place
    errors: Tensor
    limit: float

    @property
    def largest(self) -> float:
        """The largest difference of a token."""
        return float(self.errors.max())

    @property
    def differs(self) -> bool:
        """Whether the largest is more than rounding explains."""
        return not self.largest <= self.limit


def errors(name: str, got: Tensor, want: Tensor) -> Tensor:
    """[T] differences of two sides at a place; infinite where a value is not finite, and everywhere if they have different shapes."""
    if got.shape != want.shape:
        return torch.full((len(want),), torch.inf, dtype=torch.float64)
    ours, theirs = got.double().reshape(len(got), -1), want.double().reshape(len(want), -1)
    difference = (ours - theirs).norm(dim=1)
    if name not in ABSOLUTE:
        length = theirs.norm(dim=1)
        difference = difference / length.clamp(min=max(1e-3 * float(length.mean()), 1e-30))
    finite: Tensor = difference.nan_to_num(nan=torch.inf)
    return finite


def measured_rounding(precise: Trace, rounded: Trace, precision: str) -> dict[Place, float]:
    """What rounding explains at each place: it only grows through the model, and another side may round otherwise.

    Args:
        precise: Of the same model in more bits.
        rounded: In ``precision``.
        precision: ``fp32`` or ``bf16``.
    """
    most, limits = 0.0, {}
    for place in in_order(list(precise.values)):
        seen = float(errors(place[1], rounded.values[place], precise.values[place]).max())
        most = max(most, seen)
        limits[place] = max(TIMES_ROUNDING * most, FLOOR[precision])
    return limits


def compare(want: Trace, got: Trace, limits: Mapping[Place, float]) -> list[Row]:
    """Every place that both sides show, in the order of computation."""
    both = [place for place in in_order(list(want.values)) if place in got.values]
    return [Row(place, errors(place[1], got.values[place], want.values[place]), limits[place]) for place in both]


def first_difference(rows: Sequence[Row]) -> Row | None:
    """The first place that differs by more than rounding."""
    return next((row for row in rows if row.differs), None)
