"""``reward=number`` compares the last number of the response with the label."""

from typing import Any

import pytest
import torch

from rlbatch.api import Prompt, RewardError, Sample
from rlbatch_plugins.reward_number import rlbatch_register_rewards


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
    ],
)
def test_last_number(label: Any, response: str, expected: float) -> None:
    """Separators, signs, decimals and surroundings do not matter; the value of the last number does."""
    reward = rlbatch_register_rewards()["number"]
    assert list(reward([sample(label, response)])) == [expected]


def test_one_value_a_sample_in_order() -> None:
    """Samples with different labels are scored each against its own."""
    reward = rlbatch_register_rewards()["number"]
    assert list(reward([sample(1, "1"), sample(2, "1"), sample("2", "1 2")])) == [1.0, 0.0, 1.0]


@pytest.mark.parametrize("label", ["yes", None, ""])
def test_a_label_without_a_number_is_refused(label: Any) -> None:
    """No response could be right, so the prompt is wrong: it is named."""
    with pytest.raises(RewardError, match="of prompt 4 has no number"):
        rlbatch_register_rewards()["number"]([sample(label, "1")])
