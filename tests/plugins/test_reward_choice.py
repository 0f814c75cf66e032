"""``reward=choice``: which letter a response chooses."""

from __future__ import annotations

from typing import Any

import pytest

from rlbatch import reward_parts
from rlbatch.api import ConfigError, DataError
from tests.plugins.reward_cases import answer, registry, verdict


@pytest.mark.parametrize(
    ("response", "chosen"),
    [
        ("B", "B"),
        (" (b). ", "B"),
        (r"It is A, no: \boxed{B}", "B"),
        (r"\boxed{\text{(B)}}", "B"),
        (r"\boxed{\textbf{(B)}\ 5}", "B"),
        (r"\boxed{B. Berlin (a city)}", "B"),
        (r"\boxed{(A) or (B)}", ""),
        (r"\boxed{A, B}", ""),
        ("<think>I would say (A).\nAnswer: A</think>B", "B"),
        ("the answer is a matter of taste", ""),
        ("the answer is A because B is wrong", "A"),
        (r"\boxed{A}, \boxed{B}", ""),
        (r"\boxed{Berlin}", ""),
        ("The answer is A. Wait, the answer is B.", "B"),
        ("The correct answer is: **B**", "B"),
        ("Answer: (B) Berlin", "B"),
        ("answer: b", "B"),
        ("The answer is option B, as A and C are wrong", "B"),
        ("the answer is Berlin (B)", "B"),
        ("I'd say (A) or (B)", "B"),
        ("A city. So B", "B"),
        ("It is A", "A"),
        ("A city is a city", ""),
        ("CAB", ""),
        ("", ""),
        ("\0", ""),
    ],
)
def test_which_letter(response: str, chosen: str) -> None:
    """The letter that the response chooses in the end; none where it does not say one."""
    assert "".join(letter for letter in "ABCD" if verdict("choice", letter, response)) == chosen


def test_labels_and_options() -> None:
    """A letter in some form; others are refused at submit."""
    check = reward_parts.label_check(registry().rewards, "choice", {})
    for label in ("B", "(B)", "b", "B.", "B)"):
        check(label)
        assert verdict("choice", label, "B") == 1
    bad: list[Any] = ["E", "", 1, None, "A or B", ["A"]]
    for label in bad:
        with pytest.raises(DataError, match="must be one of the letters ABCD"):
            check(label)
    assert verdict("choice", "E", "(E)", letters="ABCDE") == 1
    for letters in ("", "A", "AAB", "abc", "A-Z"):
        with pytest.raises(ConfigError, match=r"reward\.options\.letters="):
            registry().build_reward("choice", {"letters": letters})


def test_the_answer_that_votes() -> None:
    """In evaluations, samples with the same one vote together."""
    assert answer("choice", "the answer is (b)") == "B"
    assert answer("choice", "The answer is E", letters="CDE") == "E"
    assert answer("choice", "none of them") is None
