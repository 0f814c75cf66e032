"""Sizes that divide a number, and the nearest of them to one that does not, for messages."""

from __future__ import annotations

import math
from collections.abc import Iterable


def divisors(number: int) -> list[int]:
    """All divisors of a number, the smallest first."""
    small = [size for size in range(1, math.isqrt(number) + 1) if number % size == 0]
    return [*small, *(number // size for size in reversed(small) if size * size < number)]


def nearest(size: int, valid: Iterable[int]) -> str:
    """The two largest valid values below a size and the smallest above it, in words."""
    values = sorted(valid)
    return either([value for value in values if value < size][-2:] + [value for value in values if value > size][:1])


def either(values: Iterable[int]) -> str:
    """Values as a choice in words, e.g. ``2, 4 or 8``."""
    words = [str(value) for value in values]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
