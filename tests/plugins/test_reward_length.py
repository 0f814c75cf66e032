"""``reward=length``: a straight line between two lengths."""

from __future__ import annotations

import pytest

from rlbatch.api import ConfigError
from tests.plugins.reward_cases import registry, verdict


@pytest.mark.parametrize(("tokens", "expected"), [(0, 1.0), (10, 1.0), (15, 0.5), (20, 0.0), (99, 0.0)])
def test_values(tokens: int, expected: float) -> None:
    """1 up to the free tokens, then a straight line to 0."""
    assert verdict("length", None, "text", tokens, free_tokens=10, most_tokens=20) == expected


def test_no_line() -> None:
    """Refused at submit."""
    with pytest.raises(ConfigError, match=r"reward\.options\.free_tokens=20: must be less than reward\.options\.most_tokens \(20\)"):
        registry().build_reward("length", {"free_tokens": 20, "most_tokens": 20})
