"""``reward=regex``: the form of a response, and patterns that are none."""

from __future__ import annotations

from typing import Any

import pytest

from rlbatch.api import ConfigError
from tests.plugins.reward_cases import registry, verdict

FORM = r"(?s)<think>.*</think>\s*<answer>[^<]*</answer>"


@pytest.mark.parametrize(
    ("response", "match", "expected"),
    [
        ("<think>a\nb</think>\n<answer>5</answer>", "full", 1),
        ("Well: <think>a</think><answer>5</answer>", "full", 0),
        ("Well: <think>a</think><answer>5</answer>", "search", 1),
        ("<answer>5</answer>", "search", 0),
        ("", "search", 0),
    ],
)
def test_verdicts(response: str, match: str, expected: int) -> None:
    """The whole response has the form, or a part of it."""
    assert verdict("regex", None, response, pattern=FORM, match=match) == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"reward\.options\.pattern: has 0 characters"),
        ({"pattern": "("}, r"reward\.options\.pattern=\(: is no regular expression"),
        ({"pattern": "a" * 10_001}, r"has 10001 characters"),
        ({"pattern": "a", "match": "part"}, r"reward\.options\.match=part"),
    ],
)
def test_what_is_no_pattern(options: dict[str, Any], message: str) -> None:
    """Refused at submit, which builds the reward too."""
    with pytest.raises(ConfigError, match=message):
        registry().build_reward("regex", options)
