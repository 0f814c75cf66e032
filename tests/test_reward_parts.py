"""What a reward says beside its reward: the final answer of a response, and how long it may take."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rlbatch import reward_parts
from rlbatch.api import Prompt, RewardError, Sample
from rlbatch.registry import load_plugins

ANSWERING = """
from dataclasses import dataclass

from rlbatch.api import *


@dataclass(frozen=True)
class Options:
    mark: str = "#"


class Plain:
    def __call__(self, samples):
        return [1.0 for _ in samples]

    def answer(self, sample):
        return {"none": None, "bad": 7}.get(sample.response, sample.response[:1])


@hookimpl
def rlbatch_register_rewards():
    after = lambda options, sample: sample.response.rpartition(options.mark)[2]
    return {"plain": Plain(), "marked": RewardSpec(lambda options: Plain(), Options, answer=after), "silent": lambda samples: []}
"""


def test_what_a_reward_says_is_the_answer(tmp_path: Path) -> None:
    """Its method, its spec's function with the options, or the whole response; what is no text is refused by the reward's name."""
    (tmp_path / "answering.py").write_text(ANSWERING)
    registry = load_plugins([str(tmp_path / "answering.py")])

    def answers(name: str, *responses: str, **options: Any) -> list[str | None]:
        samples = [Sample(Prompt(0, "", ()), 0, None, None, None, response, "stop") for response in responses]  # type: ignore[arg-type]
        return reward_parts.answer_reader(registry.rewards, name, options)(samples)

    assert answers("plain", "abc", "none") == ["a", None]
    assert answers("marked", "a#b%c") == ["b%c"]
    assert answers("marked", "a#b%c", mark="%") == ["c"]
    assert answers("silent", " a b\n") == ["a b"]
    assert answers("number", "so 1/2", "0.50", "nothing") == ["1/2", "1/2", None]
    with pytest.raises(RewardError, match="reward=plain: its answer must be a text or None, is int"):
        answers("plain", "bad")


def test_how_long_a_reward_may_take() -> None:
    """What it says, or says of its options; one that is made of others has the time of all of them."""
    deadline = partial(reward_parts.deadline_of, load_plugins().rewards)
    assert deadline("math", {}) == 10.0
    slow = {"answer_seconds": 500.0}
    assert deadline("code", slow) >= 500.0 + 10.0
    parts = {"code": {"options": slow}, "math": {}}
    assert deadline("composite", {"parts": parts}) == deadline("code", slow) + 10.0
    assert deadline("composite", {"parts": {"math": {}}}) == 120.0
