"""Samples for the tests of rewards."""

from __future__ import annotations

from functools import cache
from typing import Any

from rlbatch import reward_parts
from rlbatch.api import Prompt, Sample
from rlbatch.registry import Registry, load_plugins
from rlbatch.rewards.score import scores_of


@cache
def registry() -> Registry:
    return load_plugins()


def sample(label: Any, response: str, tokens: int = 3, index: int = 0) -> Sample:
    return Sample(Prompt(0, "text", (1, 2), label), index, [0] * (tokens + 2), [], [], response, "stop")  # type: ignore[arg-type]


def answer(name: str, response: str, **options: Any) -> str | None:
    """The final answer of one response."""
    (found,) = reward_parts.answer_reader(registry().rewards, name, options)([sample(None, response)])
    return found


def verdict(name: str, label: Any, response: str, tokens: int = 3, **options: Any) -> float:
    """The reward of one response."""
    ((score, _),) = scores_of(name, registry().build_reward(name, options), [sample(label, response, tokens)])
    return score
