"""``reward=composite``: parts with weights, in a product, behind a gate; and what no composite can be."""

from __future__ import annotations

from typing import Any

import pytest

from rlbatch import reward_parts
from rlbatch.api import ConfigError, DataError, RlbatchError
from rlbatch.rewards.score import scores_of
from tests.plugins.reward_cases import answer, registry, sample

NUMBER, FORM = {"reward": "number"}, {"reward": "regex", "options": {"pattern": "^Answer"}}


@pytest.mark.parametrize(
    ("response", "options", "total", "parts"),
    [
        ("Answer 5", {"parts": {"number": {}, "form": FORM | {"weight": 0.2}}}, 1.2, {"number": 1, "form": 1}),
        ("5", {"parts": {"right": NUMBER, "form": FORM | {"weight": 0.2}}}, 1.0, {"right": 1, "form": 0}),
        ("5", {"parts": {"right": NUMBER, "form": FORM}, "combine": "product"}, 0.0, {"right": 1, "form": 0}),
        ("Answer 5", {"parts": {"right": NUMBER, "form": FORM}, "combine": "product"}, 1.0, {"right": 1, "form": 1}),
        ("5", {"parts": {"right": NUMBER, "form": FORM | {"weight": 0, "gate": True}}}, 0.0, {"right": 1, "form": 0}),
        ("Answer 5", {"parts": {"right": NUMBER, "form": FORM | {"weight": 0, "gate": True}}}, 1.0, {"right": 1, "form": 1}),
    ],
)
def test_totals(response: str, options: dict[str, Any], total: float, parts: dict[str, float]) -> None:
    """The total trains; parts are told before their weights."""
    reward_parts.label_check(registry().rewards, "composite", options)(5)
    assert scores_of("composite", registry().build_reward("composite", options), [sample(5, response)]) == [(total, parts)]


def test_its_calls_are_as_wide_as_its_parts_need() -> None:
    """A part that needs the group makes all of it a reward of groups."""
    parts: dict[str, Any] = {"number": {}}
    assert reward_parts.scope_of(registry().rewards, "composite", {"parts": parts}) == "sample"
    parts["remote"] = {"options": {"url": "http://localhost:1"}}
    assert reward_parts.scope_of(registry().rewards, "composite", {"parts": parts}) == "group"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"reward\.options\.parts: has none"),
        ({"parts": {"number": {"weight": -1}}}, r"number\.weight=-1"),
        ({"parts": {"number": {"weight": 0}}}, "all weights are 0"),
        ({"parts": {"number": {"weight": 0.5}}, "combine": "product"}, "must be 1 in a product"),
        ({"parts": {"total": NUMBER}}, r"parts\.total"),
        ({"parts": {"nmber": {}}}, "reward=composite: the part nmber: reward=nmber: unknown"),
        ({"parts": {"form": {"reward": "regex"}}}, r"pattern: has 0 characters"),
        ({"parts": {"more": {"reward": "composite", "options": {"parts": {"number": {}}}}}}, "a part of itself"),
        ({"parts": {"number": {"wieght": 1}}}, "wieght: unknown key. Did you mean"),
    ],
)
def test_what_is_refused(options: dict[str, Any], message: str) -> None:
    """At submit, which builds the reward too."""
    with pytest.raises(RlbatchError, match=message):
        registry().build_reward("composite", options)


def test_labels_are_those_of_all_parts() -> None:
    """One that a part does not take is refused, and the message names that part's reward."""
    with pytest.raises(DataError, match=r"^reward=number: label 'five' has no number"):
        reward_parts.label_check(registry().rewards, "composite", {"parts": {"number": {}, "form": FORM}})("five")


def test_negative_weights_name_their_key() -> None:
    """In the style of all keys."""
    with pytest.raises(ConfigError, match=r"reward\.options\.parts\.number\.weight=-0\.5: must be 0 or more"):
        registry().build_reward("composite", {"parts": {"number": {"weight": -0.5}}})


def test_the_answer_is_that_of_the_first_part_that_tells_one() -> None:
    """Whatever stands before it; without such a part, the whole response."""
    parts = {"form": FORM, "inner": {"reward": "composite", "options": {"parts": {"number": {}}}}}
    assert answer("composite", "Answer 0.5", parts=parts) == "1/2"
    assert answer("composite", " Answer 0.5", parts={"form": FORM}) == "Answer 0.5"
