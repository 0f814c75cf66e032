"""Random numbers by counting: the n-th after a seed, without the ones before it (splitmix64; Steele, Lea, Flood: Fast splittable
pseudorandom number generators, 2014).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

STEP, FIRST, SECOND = -7046029254386353131, -4658895280553007687, -7723592293110705685
"""Constants of splitmix64, as signed 64-bit numbers."""


def numbers(seeds: Tensor, counts: Tensor) -> Tensor:
    """The ``counts``-th random numbers of ``seeds``: int64 with 64 random bits each, in the shape to which both int64 tensors broadcast."""
    mixed = seeds + (counts + 1) * STEP
    mixed = (mixed ^ shift_right(mixed, 30)) * FIRST
    mixed = (mixed ^ shift_right(mixed, 27)) * SECOND
    return mixed ^ shift_right(mixed, 31)


def shift_right(values: Tensor, bits: int) -> Tensor:
    """Shifts int64 values to the right, with zeros from the left."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)
