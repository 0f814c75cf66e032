"""Each prompt once an epoch, none twice in a step, sets by their weights; a restart goes on exactly."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from rlbatch.api import ConfigError
from rlbatch.prompts.prompt_order import PromptOrder, SetOrder


def one(rows: int, seed: int = 0) -> PromptOrder:
    return PromptOrder([SetOrder(rows, str(seed))])


def mixed() -> PromptOrder:
    """Three sets at 5:2:1, of which the smallest is soon through; every seventh prompt is too long."""
    sets = [SetOrder(40, "0 a"), SetOrder(11, "0 b", None, 40), SetOrder(5, "0 c", np.array([3, 1, 2, 1, 0]), 51)]
    return PromptOrder(sets, [5, 2, 1], lambda positions: [position % 7 != 0 for position in positions])


def test_every_prompt_once_an_epoch() -> None:
    """An epoch is a permutation; the next epoch and another seed give another one; the same seed the same one."""
    order = one(12)
    first, second = ([prompt for _ in range(3) for prompt in order.take(4)] for _ in range(2))
    assert sorted(first) == sorted(second) == list(range(12))
    assert first != second
    assert one(12).take(12) == first
    assert one(12, seed=1).take(12) != first


@pytest.mark.parametrize(("rows", "count"), [(10, 4), (10, 9), (10, 10), (7, 3), (5, 1)])
def test_also_where_a_step_straddles_epochs(rows: int, count: int) -> None:
    """No prompt twice in a step, and after each step every prompt was drawn equally often, give or take the epoch that has begun."""
    order, drawn = one(rows, seed=3), [0] * rows
    for _ in range(60):
        step = order.take(count)
        assert len(set(step)) == count
        for prompt in step:
            drawn[prompt] += 1
        assert max(drawn) - min(drawn) <= 1 + (count > rows // 2)
    assert sum(drawn) == 60 * count
    assert max(drawn) - min(drawn) <= 1 + (count > rows // 2)


def test_prompts_that_a_step_holds_wait() -> None:
    """They come in a later step of the same epoch, not never."""
    order = one(6)
    first = order.take(4)
    held = [*order.take(2, held=first), *first]
    again = order.take(2, held=held[:4])
    assert not set(again) & set(held[:4])
    later = order.take(4)
    assert sorted([*again, *later]) == list(range(6))


def test_fewer_where_there_are_no_others() -> None:
    """Asked again and again, the place stays, and what waited comes."""
    order, whole = one(5), one(5)
    first = order.take(4)
    for _ in range(3):
        rest = order.take(4, held=first, or_fewer=True)
        assert len(rest) == 1
        cursor = order.cursor
        assert order.take(4, held=[*first, *rest], or_fewer=True) == []
        assert order.cursor == cursor
        first = order.take(4, held=rest)
        assert not set(first) & set(rest)
    assert whole.take(4) == one(5).take(4)


def test_a_mixture_is_even() -> None:
    """After any number of prompts each set has had its share to within one; too long ones never come."""
    order, drawn = mixed(), [0, 0, 0]
    for total in range(1, 200):
        (position,) = order.take(1)
        assert position % 7
        drawn[0 if position < 40 else 1 if position < 51 else 2] += 1
        assert all(abs(count - total * weight / 8) <= 1 for count, weight in zip(drawn, (5, 2, 1), strict=True))


def test_a_curriculum_orders_each_epoch() -> None:
    """By the column's values, ascending; equal ones are shuffled."""
    values = np.array([5.0, 1.0, 3.0, 1.0, 4.0, 1.0, 2.0, 1.0])
    order = PromptOrder([SetOrder(8, "0", values)])
    epochs = [order.take(8) for _ in range(8)]
    assert all([values[row] for row in epoch] == sorted(values) for epoch in epochs)
    assert len({tuple(epoch[:4]) for epoch in epochs}) > 1


@pytest.mark.parametrize("make", [lambda: one(10, seed=5), mixed])
def test_the_cursor_resumes_the_order(make: Callable[[], PromptOrder]) -> None:
    """N + M steps equal N steps, a restart from the cursor (through JSON), and M steps, across epochs and sets."""
    for before in range(12):
        whole, first = make(), make()
        steps = [whole.take(4) for _ in range(before + 9)]
        resumed_steps = [first.take(4) for _ in range(before)]
        resumed = make()
        resumed.cursor = tuple(json.loads(json.dumps(first.cursor)))
        resumed_steps += [resumed.take(4) for _ in range(9)]
        assert resumed_steps == steps


def test_cursors_of_before_and_wrong_ones() -> None:
    """Two numbers, as checkpoints had them, are a place in one set; what is no place is refused."""
    order = one(10)
    order.cursor = (1, 4)
    following = one(10)
    for _ in range(7):
        following.take(2)
    assert order.take(6) == following.take(6)
    for wrong in ((), (0,), (0, 11), (0, -1), (0, 1, 10)):
        with pytest.raises(ValueError, match=r"place|unpack"):
            order.cursor = wrong
    with pytest.raises(ValueError, match=r"place|unpack"):
        mixed().cursor = (0, 0)
    with pytest.raises(ValueError, match=r"place|unpack"):
        mixed().cursor = (*mixed().cursor, 3)


def test_a_step_larger_than_the_data_is_refused() -> None:
    """Instead of holding prompts twice, or looking for ever for one that is usable."""
    with pytest.raises(ConfigError, match=r"train\.prompts_per_step=11: must be at most what data\.train has, 10 usable prompts"):
        one(10).take(11)

    def none(positions: Sequence[int]) -> list[bool]:
        return [False] * len(positions)

    with pytest.raises(ConfigError, match="0 usable prompts"):
        PromptOrder([SetOrder(10, "0")], usable=none).take(1)
