"""What a config key or a plugin's option may hold, beyond its Python type: ``Annotated[int, Range(least=1)]``.

Checked at submit, for every key and option alike.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated, Any

INT32, INT64 = 2**31 - 1, 2**63 - 1


def option(default: Any, doc: str) -> Any:
    """A documented field of an options dataclass."""
    return field(default=default, metadata={"doc": doc})


@dataclass(frozen=True)
class Range:
    """Which numbers a key takes: those that whoever uses it can hold. Never NaN or infinity.

    Attributes:
        least, most: Bounds that are in it.
        above, below: Bounds that are not.
    """

    least: float = -math.inf
    most: float = math.inf
    above: float = -math.inf
    below: float = math.inf

    def violated(self, value: float) -> str:
        """The rule that a number breaks, in words; empty if it is in the range."""
        if not math.isfinite(value):
            return "must be a finite number"
        if value <= self.above or value < self.least:
            return f"must be greater than {_shown(self.above)}" if self.above >= self.least else f"must be {_shown(self.least)} or more"
        if value >= self.below or value > self.most:
            return f"must be less than {_shown(self.below)}" if self.below <= self.most else f"must be {_shown(self.most)} or less"
        return ""


def _shown(bound: float) -> str:
    return str(bound) if isinstance(bound, int) else f"{bound:g}"


@dataclass(frozen=True)
class PathRule:
    """A text that names a file or folder: submit makes it absolute, as ranks may work in another folder.

    Attributes:
        words: What is no path.
        suffix: Only what ends so is a path.
        is_for_ranks: Whether ranks read or write it: then their containers must show it.
        is_guess: It may be something else, e.g. a name in a registry: it is a path if it begins like one or is there.
    """

    words: tuple[str, ...] = ()
    suffix: str = ""
    is_for_ranks: bool = True
    is_guess: bool = False


FilePath = Annotated[str, PathRule()]
"""Path of a file or folder that every rank sees; empty: none."""
Count = Annotated[int, Range(above=0, most=INT32)]
"""A number of things, at least one."""
CountOrZero = Annotated[int, Range(least=0, most=INT32)]
"""A number of things, or 0."""
Seconds = Annotated[float, Range(above=0, most=2_000_000)]
"""A limit; the most is 23 days: system calls take milliseconds in 32 bits."""
