"""``reward=sequence`` scores the share of right positions."""

from typing import Any

import pytest
import torch

from rlbatch.api import DataError, NoOptions, Prompt, Sample
from rlbatch_plugins.reward_sequence import rlbatch_register_rewards


def sample(label: Any, response: str) -> Sample:
    empty = torch.zeros(0)
    return Sample(Prompt(0, "", (), label=label), 0, empty, empty, empty, response, "stop")


@pytest.mark.parametrize(
    ("label", "response", "expected"),
    [
        ("a b c", "a b c", 1.0),
        ("a b c", " a  b\nc ", 1.0),
        (["a", "b", "c"], "a b c", 1.0),
        ([1, 2], "1 2", 1.0),
        (7, "7", 1.0),
        ("a b c", "a c b", 1 / 3),
        ("a b c", "c a b", 0.0),
        ("a b c", "a b", 2 / 3),
        ("a b c", "", 0.0),
        ("a b c", "a b c d", 3 / 4),
        ("a b c", "a b c a b c", 1 / 2),
        ("", "a", 0.0),
        ("", "", 0.0),
    ],
)
def test_share_of_right_positions(label: Any, response: str, expected: float) -> None:
    """By position, over the longer of label and response: missing, wrong and surplus tokens all cost the same."""
    reward = rlbatch_register_rewards()["sequence"].build(NoOptions())
    assert list(reward([sample(label, response)])) == [pytest.approx(expected)]


def test_one_value_a_sample_in_order() -> None:
    """Samples with different labels are scored each against its own."""
    reward = rlbatch_register_rewards()["sequence"].build(NoOptions())
    assert list(reward([sample("a", "a"), sample("a", "b"), sample("b", "b")])) == [1.0, 0.0, 1.0]


@pytest.mark.parametrize("label", [None, True, 0.00001, {"a": "b"}, "", " ", [], ["a", None], [["a"]], ["a b"]])
def test_labels_without_tokens_are_refused(label: Any) -> None:
    """What no response could equal, and what has no text of its own."""
    with pytest.raises(DataError, match="must "):
        rlbatch_register_rewards()["sequence"].check_label(NoOptions(), label)
