"""``reward=gsm8k``: GSM8K's own answers verify against themselves, and which number of a response counts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlbatch import reward_parts
from tests.plugins.reward_cases import answer, registry, verdict

GOLD = json.loads(Path(__file__).with_name("gsm8k_answers.json").read_text(encoding="utf-8"))
"""Of GSM8K's test set (MIT licence): with thousands, negative ones, and the first of it."""


@pytest.mark.parametrize("gold", GOLD, ids=lambda gold: gold.rpartition(" ")[2])
def test_gold_answers_are_right(gold: str) -> None:
    """As gsm8k, number and math read them."""
    for name in ("gsm8k", "number", "math"):
        reward_parts.label_check(registry().rewards, name, {})(gold)
        assert verdict(name, gold, gold) == 1
        assert verdict(name, gold, "The answer is 987654") == 0


@pytest.mark.parametrize(
    ("response", "flexible", "strict"),
    [
        ("#### 18", 1, 1),
        ("####18", 1, 1),
        ("#### $18 a day, for 2 days", 1, 1),
        ("#### 17\n#### 18.00", 1, 1),
        ("18 #### 17", 0, 0),
        ("18 ####", 0, 0),
        (r"\boxed{18} in 3 steps", 1, 0),
        ("so 18", 1, 0),
        ("18 or 19", 0, 0),
        ("", 0, 0),
    ],
)
def test_which_number_counts(response: str, flexible: int, strict: int) -> None:
    """Behind the last mark the first one; else the box's, else the last, unless it is strict."""
    assert verdict("gsm8k", "#### 18", response) == flexible
    assert verdict("gsm8k", 18, response, strict=True) == strict


def test_the_answer_that_votes() -> None:
    """In evaluations, samples with the same one vote together."""
    assert answer("gsm8k", "1 #### 1,234.0 apples") == "1234"
    assert answer("gsm8k", "so 1/2") == "1/2"
    assert answer("gsm8k", "so 1/2", strict=True) is None
