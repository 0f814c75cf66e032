"""``reward=exact``: word for word, of all of the response or a part of it."""

from __future__ import annotations

from typing import Any

import pytest

from rlbatch import reward_parts
from rlbatch.api import DataError
from tests.plugins.reward_cases import answer, registry, verdict


@pytest.mark.parametrize(
    ("label", "response", "options", "expected"),
    [
        ("New York", " New \n York ", {}, 1),
        ("New York", "new york", {}, 0),
        ("New York", "new york", {"ignore_case": True}, 1),
        ("Paris", "It is Paris", {}, 0),
        (["Paris", "Lutetia"], "Lutetia", {}, 1),
        (7, "7", {}, 1),
        ("Paris", "I think so.\nParis\n\n", {"answer": "last_line"}, 1),
        ("Paris", r"\boxed{Paris}.", {"answer": "boxed"}, 1),
        ("Paris", "Paris", {"answer": "boxed"}, 0),
        ("Paris", "", {"answer": "last_line"}, 0),
        ("Paris", "Paris\0", {}, 0),
    ],
)
def test_verdicts(label: Any, response: str, options: dict[str, Any], expected: int) -> None:
    """White space and, if wanted, case do not matter; what is not the answer counts for nothing."""
    assert verdict("exact", label, response, **options) == expected


@pytest.mark.parametrize("label", ["", " ", None, True, [], ["a", ""], {"a": 1}])
def test_labels_that_nothing_can_equal(label: Any) -> None:
    """Refused at submit."""
    with pytest.raises(DataError, match=r"^reward=exact: label "):
        reward_parts.label_check(registry().rewards, "exact", {})(label)


def test_the_answer_that_votes() -> None:
    """In evaluations, samples with the same one vote together."""
    assert answer("exact", " two\n words ") == "two words"
    assert answer("exact", "A\nLast", answer="last_line", ignore_case=True) == "last"
    assert answer("exact", "no box", answer="boxed") is None
