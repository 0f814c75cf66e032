"""The order in which prompts are drawn: of one set, or of several that are mixed by weight. Exact at resume, the same on every rank."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from fractions import Fraction
from math import ceil
from typing import Any

import numpy as np

from rlbatch.api import ConfigError

Cursor = tuple[int, ...]
"""A place in an order, to be stored. Of one set: epoch, position in it, and rows that wait. Of several, for each: how many were drawn,
epoch, position, how many wait, and these."""
Usable = Callable[[Sequence[int]], Sequence[bool]]
"""Says which prompts may be trained on, by their positions."""


def round_size(missing: int, oversampling: float) -> int:
    """New prompts of a round in which so many groups are missing; 1.1 is eleven tenths, whatever the float is."""
    return ceil(missing * Fraction(str(oversampling)))


class SetOrder:
    """An endless order of one set's rows: a seeded permutation of all of them an epoch.

    Args:
        rows: How many there are.
        seed: Determines the permutations.
        values: [rows] each epoch is ordered by them, ascending, equal ones shuffled; None: all are shuffled.
        first: Position of its first row among all sets.
    """

    def __init__(self, rows: int, seed: str, values: Any = None, first: int = 0) -> None:
        self._rows, self._seed, self._values, self._first = rows, seed, values, first
        self.drawn = 0
        self._waiting: list[int] = []
        self._go_to(0, 0)

    @property
    def state(self) -> Cursor:
        """Epoch, position in it, and rows of it that wait, because they were in the step that they would have come to again."""
        return self._epoch, self._position, *self._waiting

    @state.setter
    def state(self, state: Cursor) -> None:
        epoch, position, *waiting = state
        if min(state) < 0 or position > self._rows or any(row >= self._rows for row in waiting):
            raise ValueError(f"{list(state)} is no place among {self._rows} prompts")
        self._waiting = list(waiting)
        self._go_to(epoch, position)

    def coming(self, count: int) -> list[int]:
        """Positions that are likely to be next."""
        rows = [*self._waiting, *self._permutation[self._position : self._position + count].tolist()]
        return [self._first + row for row in rows[:count]]

    def next(self, held: Collection[int], is_usable: Callable[[int], bool]) -> int | None:
        """The next usable position; one that is held waits. None: there is none in a whole epoch, and the place stays where it is."""
        before = self.state
        for index, row in enumerate(self._waiting):
            if self._first + row not in held:
                del self._waiting[index]
                return self._first + row
        epochs = 0
        while True:
            if self._position == self._rows:
                epochs += 1
                if epochs == 2:
                    self.state = before
                    return None
                self._go_to(self._epoch + 1, 0)
            row = int(self._permutation[self._position])
            self._position += 1
            position = self._first + row
            if not is_usable(position):
                continue
            if position not in held:
                return position
            self._waiting.append(row)

    def _go_to(self, epoch: int, position: int) -> None:
        if getattr(self, "_epoch", None) != epoch:
            order = list(range(self._rows))
            random.Random(f"prompt order {self._seed} {epoch}").shuffle(order)
            shuffled = np.array(order, np.int64)
            ordered = shuffled if self._values is None else shuffled[np.argsort(self._values[shuffled], kind="stable")]
            self._permutation = ordered
        self._epoch, self._position = epoch, position


class PromptOrder:
    """An endless order of prompts, by their positions: each once an epoch of its set, none twice in a step.

    Sets are mixed as evenly as their weights allow: after any number of prompts each set has had its share, to within one.

    Args:
        sets: The orders of the sets.
        weights: Weight of each set.
        usable: Which prompts may be trained on; None: all.
    """

    def __init__(self, sets: Sequence[SetOrder], weights: Sequence[float] = (1.0,), usable: Usable | None = None) -> None:
        self._sets, self._usable = sets, usable
        self._weights = [weight / sum(weights) for weight in weights]

    @property
    def cursor(self) -> Cursor:
        """The place in the order: store it with a checkpoint, set it to go on from there."""
        if len(self._sets) == 1:
            return self._sets[0].state
        states = [(one.drawn, one.state) for one in self._sets]
        return tuple(number for drawn, state in states for number in (drawn, *state[:2], len(state) - 2, *state[2:]))

    @cursor.setter
    def cursor(self, cursor: Sequence[int]) -> None:
        """Raises ValueError for what is no place in this order."""
        if len(self._sets) == 1:
            self._sets[0].state = tuple(cursor)
            return
        numbers = list(cursor)
        for one in self._sets:
            drawn, epoch, position, waiting = numbers[:4]
            one.state = (epoch, position, *numbers[4 : 4 + waiting])
            one.drawn = drawn
            numbers = numbers[4 + waiting :]
        if numbers:
            raise ValueError(f"{list(cursor)} is no place among {len(self._sets)} sets")

    def take(self, count: int, held: Collection[int] = (), *, or_fewer: bool = False) -> list[int]:
        """The next ``count`` prompts, as positions, all different and none that the step holds already; fewer if there are no others and
        that will do.

        Raises:
            ConfigError: a set has fewer prompts than the step takes of it.
        """
        known: dict[int, bool] = {}

        def is_usable(position: int) -> bool:
            if self._usable is None:
                return True
            if position not in known:
                coming = [one for order in self._sets for one in order.coming(count)]
                asked = list(dict.fromkeys([position, *(one for one in coming if one not in known)]))[: count + 1]
                known.update(zip(asked, self._usable(asked), strict=True))
            return known[position]

        taken: list[int] = []
        busy = set(held)
        for _ in range(count):
            number = self._due()
            position = self._sets[number].next(busy, is_usable)
            if position is None and or_fewer:
                break
            if position is None:
                raise ConfigError(
                    f"train.prompts_per_step={count}: must be at most what data.train has, {len(busy)} usable prompts"
                    f"{f' of set {number + 1}' if len(self._sets) > 1 else ''} are in this step already. Take fewer a step, or add prompts."
                )
            self._sets[number].drawn += 1
            busy.add(position)
            taken.append(position)
        return taken

    def _due(self) -> int:
        """The set that is furthest behind its share."""
        total = sum(one.drawn for one in self._sets) + 1
        behind = [weight * total - one.drawn for weight, one in zip(self._weights, self._sets, strict=True)]
        return behind.index(max(behind))
