"""Environment variables of ranks: those that launchers set, read strictly and compared where two say the same, and torch's allocator's."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

from rlbatch.api import ConfigError
from rlbatch.launch.ranks.nodelist import shown

START = "Start jobs with `python -m rlbatch.submit`."
LAUNCH_VARIABLE = "RLBATCH_LAUNCH"
"""An id that a launcher without job ids gives to all ranks of one start: two starts in one run folder are told apart by it."""
ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Options of torch's GPU allocator; torch reads the second, newer one first."""


class Variables:
    """Variables of a process.

    Attributes:
        values: The variables that are not empty: an empty one counts as not set.
    """

    def __init__(self, values: Mapping[str, str]) -> None:
        self.values = {name: value for name, value in values.items() if value}

    def first(self, names: Iterable[str]) -> str:
        """The first of the names that is set, else the empty string."""
        return next((name for name in names if name in self.values), "")

    def require(self, name: str) -> str:
        """A variable's text; raises ConfigError if it is not set."""
        if name not in self.values:
            raise ConfigError(f"{name}=: is not set, so this is no rank of a job. {START}")
        return self.values[name]

    def number(self, name: str, missing: int | None = None) -> int:
        """A variable's number; ``missing`` if it is not set and need not be.

        Raises:
            ConfigError: it is not set, or no number of at most 9 digits.
        """
        if missing is not None and name not in self.values:
            return missing
        text = self.require(name)
        if not re.fullmatch("[0-9]{1,9}", text):
            raise ConfigError(f"{name}={shown(text)}: must be a number, the launcher sets it. {START}")
        return int(text)

    def require_same(self, *names: str) -> None:
        """Compares those of the variables that are set; raises ConfigError if they differ."""
        present = [name for name in names if name in self.values]
        for name in present[1:]:
            if self.values[name] != self.values[present[0]]:
                self.contradict(present[0], name, "they must be equal")

    def require_less(self, small: str, large: str) -> None:
        """Raises ConfigError if the first number is not less than the second."""
        if self.number(small) >= self.number(large):
            self.contradict(small, large, "the first must be less than the second")

    def contradict(self, first: str, second: str, rule: str) -> NoReturn:
        """Raises a ``ConfigError`` that names two variables with their values, and what must hold."""
        values = " and ".join(f"{name}={shown(self.values[name])}" for name in (first, second))
        raise ConfigError(f"{values}: contradict each other, {rule}. Unset what your launcher did not set.")


def set_allocator(options: Mapping[str, Any]) -> None:
    """Sets torch's variables as ``train.allocator`` says, if it says anything. torch reads them once: call it before torch is imported."""
    if options:
        text = ",".join(f"{name}:{value}" for name, value in options.items())
        os.environ.update(dict.fromkeys(ALLOCATOR_VARIABLES, text))
