"""``reward=number`` compares the last number of the response with the label."""

import math
from typing import Any

import pytest
import torch

from rlbatch.api import DataError, NoOptions, Prompt, RewardError, Sample
from rlbatch_plugins.reward_number import last_number, rlbatch_register_rewards


def sample(label: Any, response: str) -> Sample:
    empty = torch.zeros(0)
    return Sample(Prompt(4, "", (), label=label), 0, empty, empty, empty, response, "stop")


@pytest.mark.parametrize(
    ("label", "response", "expected"),
    [
        (7, "7", 1.0),
        ("7", "The sum of 3 and 4 is 7.", 1.0),
        (7, "7, because 3 + 4 = 8", 0.0),
        (7, "17", 0.0),
        (7, "", 0.0),
        (7, "seven", 0.0),
        (0, "none", 0.0),
        (1234, "It costs $1,234.", 1.0),
        ("She pays 2 x 617.\n#### 1,234", "1234", 1.0),
        (1234567, "1,234,567", 1.0),
        (3, "1,2,3", 1.0),
        (2345, "1,2345", 1.0),
        (-5, "3 - 8 = -5", 1.0),
        (-5, "3 - 8 = \u22125", 1.0),
        (-5, "(-5)", 1.0),
        (5, "9-5", 1.0),
        (-5, "9-5", 0.0),
        (5, "-5", 0.0),
        (18, "18.00", 1.0),
        (5, "3.5", 0.0),
        (18, "**18**\n", 1.0),
        (7, "007", 1.0),
        (1, "9" * 5000, 0.0),
        (0.00001, "It is 0.00001", 1.0),
        (0.00001, "It is 1e-05.", 1.0),
        (0.00001, "It is 5", 0.0),
        (1e16, "10000000000000000", 1.0),
        (1e16, "10,000,000,000,000,001", 0.0),
        (1e16, "16", 0.0),
        (2.5e-7, "2.5 \\times 10^{-7}", 1.0),
        (2.5e-7, "2.5×10⁻⁷", 1.0),
        (2.5e-7, "7", 0.0),
        ("2.5e-7", "0.00000025", 1.0),
        (0.1, "3 * 0.1 = 0.30000000000000004; so .1", 1.0),
        (5, "5.", 1.0),
        (500, "Rs.500", 1.0),
        (5, "...5", 1.0),
        (0, "0", 1.0),
        (-0.0, "0", 1.0),
        (-5, "-$5", 1.0),
        ("+5", "x = +5", 1.0),
        (5, "3+5", 1.0),
        (-5, "\\boxed{- 5}", 1.0),
        (-5, "答案是-5。", 1.0),
        (5, "- 5 apples", 1.0),
        (20, "50%-20%", 1.0),
        (1234, "1{,}234", 1.0),
        (1234, "1\u202f234", 1.0),
        (0.75, "3/4", 1.0),
        (0.75, "-\\frac{3}{4}", 0.0),
        ("3/4", "1/4", 0.0),
        (1.5, "1 1/2 cups", 1.0),
        ("\\frac{1}{2}", "\\frac{3}{2}", 0.0),
        (5, "5/0", 0.0),
        (28, "\\boxed{28\\%}", 1.0),
        (15, "15\\mbox{ cm}^2", 1.0),
        (90, "90^\\circ", 1.0),
        (2, "AZYUK2A", 0.0),
        (2, "rule-v2", 0.0),
        (1, "x_1", 0.0),
        (5, "10^5", 0.0),
        (10, "10^{x+5}", 0.0),
        (2, "\\sqrt{2}", 0.0),
        (2, "2\\pi", 0.0),
        (5, "204_5", 0.0),
        (1, "1e999999999", 0.0),
        (1, "1e" + "9" * 5000, 0.0),
        (1, "inf", 0.0),
    ],
)
def test_last_number(label: Any, response: str, expected: float) -> None:
    """Separators, signs, exponents, fractions and surroundings do not matter; the value of the last number does, exactly."""
    reward = rlbatch_register_rewards()["number"].build(NoOptions())
    rlbatch_register_rewards()["number"].check_label(NoOptions(), label)
    assert list(reward([sample(label, response)])) == [expected]


def test_one_value_a_sample_in_order() -> None:
    """Samples with different labels are scored each against its own."""
    reward = rlbatch_register_rewards()["number"].build(NoOptions())
    assert list(reward([sample(1, "1"), sample(2, "1"), sample("2", "1 2")])) == [1.0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("label", "problem"),
    [
        *((label, "has no number") for label in ("yes", None, "", True, [5], {"a": 5}, "rule-v2", "２", math.nan, math.inf)),
        *(
            (label, r"has \d numbers")
            for label in ("1 or 2", "9-5", "12:30", "(1, 2)", "2024-05-06", "6 x 3", "18 = 6 x 3", "x = 3 or x = 4")
        ),
        *((label, r"has \d numbers") for label in ("a = 5, b = 6", "(1, 2) = 3", "If x = 3 then y = 4", "6 x 3 = 20 - 2")),
        (10**600, "is larger than 400 digits"),
        *((label, "is more than a number") for label in ("2x", "3n", "18i", "5k", "5 M", "5 million", "2 thirds", "18 squared", "18/n")),
        *((label, "is more than a number") for label in ("minus 18", "18 and a half", "log 18", "more than 18", "x^2 = 4", "18 or so")),
        *((label, "is more than a number") for label in ("10^5", "- 5", ">5", "5!", "2½", "2\\pi", "1_000", "1e500", "\\sqrt{2}", "5/0")),
    ],
)
def test_labels_that_are_no_number_are_refused(label: Any, problem: str) -> None:
    """No response could be right, or wrong ones could: it is refused at submit, and by the reward itself, which names the prompt."""
    reward = rlbatch_register_rewards()["number"].build(NoOptions())
    with pytest.raises(DataError, match=f"^label .*{problem}"):
        rlbatch_register_rewards()["number"].check_label(NoOptions(), label)
    with pytest.raises(RewardError, match=f"of prompt 4 {problem}"):
        reward([sample(label, "1")])


@pytest.mark.parametrize(
    ("label", "value"),
    [
        *(
            (label, "18")
            for label in ("6 x 3 = 18", "x = 6 \\times 3 = 18", "Total: $6 + $12 = $18 a day", "2*9=18 = 18.0", "3(6) = 18 apples")
        ),
        *(
            (label, "18")
            for label in ("The answer is 18", "so 2 + 2 = 4\n#### 18", "#### 9 * 2 = 18", "$18", "18%", "x = 18", "$18/hour", "18 a day")
        ),
        *((label, "18") for label in ("18 m/s^2", "18 \\text{ cm}^2", "18 ft²", "18 square feet", "18 m", "The answer is: **18**.")),
        *((label, "1800") for label in ("1,800", "1,000 + 800 = 1,800", "#### 1,800")),
        *((label, "-18") for label in ("-6 * 3 = -18", "-$18", "\\boxed{-18}")),
        ("1/4 + 1/2 = 3/4", "0.75"),
    ],
)
def test_labels_with_one_meaning(label: str, value: str) -> None:
    """Units, prose around one number, GSM8K's mark and a calculation with its result."""
    reward = rlbatch_register_rewards()["number"].build(NoOptions())
    rlbatch_register_rewards()["number"].check_label(NoOptions(), label)
    assert list(reward([sample(label, value), sample(label, "7")])) == [1.0, 0.0]


def test_hostile_responses_take_no_time() -> None:
    """A response is any text: none takes more than its length, and of a huge one the end is read. A pattern that goes back and forth over
    such a response would take hours, which the suite does not have.
    """
    assert last_number("9" * 10_000_000) is None
    assert last_number("1, " * 3_000_000 + "72 apples") == 72
    for part in ("1,", "1,111", "9/", "9 ", "\\sqrt[", "\\frac{", "x_{", "10^", "- ", "1.1"):
        last_number(part * (50_000 // len(part)))
