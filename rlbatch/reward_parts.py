"""Rewards, and those that are made of others: how they are built, where they run, which labels they take, what answers they read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from rlbatch.api import ConfigError, DataError, Reward, RewardError, RewardSpec, RlbatchError, Sample
from rlbatch.api.declarations import Scope, whole_response
from rlbatch.foreign_code import error_text, foreign_code
from rlbatch.tables import Table

Parts = Mapping[str, tuple[str, Mapping[str, Any]]]
"""Name of a part -> name and options of its reward."""
Answers = Callable[[Sequence[Sample]], list[str | None]]
"""A function that tells the final answer of each response."""


def build(rewards: Table, name: str, options: Mapping[str, Any], within: tuple[str, ...] = ()) -> Reward:
    """A reward with all its parts, ready to be called, itself a part of those that it is ``within``.

    Raises:
        PluginError: what builds it raised, or returned no function.
        ConfigError: it is a part of itself, or has one that runs in the rank alone.
    """
    parts = _parts(rewards, name, options)
    if name in within:
        raise ConfigError(f"reward={within[0]}: has {name} as a part of itself. Name another reward.")
    if parts is None:
        return cast(Reward, rewards.built(name, options, "samples"))
    built = {}
    for part, (reward, given) in parts.items():
        if rewards.named(reward, f"reward={name}: the part {part}: reward").value.scope == "rank":
            raise ConfigError(f"reward={name}: the part {part} is reward={reward}, which runs in the rank alone. Name another reward.")
        built[part] = build(rewards, reward, given, (*within, name))
    return cast(Reward, rewards.built(name, options, "samples", built))


def _parts(rewards: Table, name: str, options: Mapping[str, Any]) -> Parts | None:
    """Rewards that a reward is made of, as ``RewardSpec.parts`` says; None: it is not."""
    entry = rewards[name]
    if entry.value.parts is None:
        return None
    parsed = entry.parse(options, rewards.key)
    with foreign_code(f"reward={name}", "its parts", error_type=ConfigError):
        return cast(Parts, entry.value.parts(parsed))


def scope_of(rewards: Table, name: str, options: Mapping[str, Any]) -> Scope:
    """What one call of a reward gets, and where; see ``RewardSpec``."""
    spec = cast(RewardSpec, rewards[name].value)
    if spec.is_light:
        return "rank"
    parts = (_parts(rewards, name, options) or {}).values()
    return "group" if any(scope_of(rewards, reward, given) == "group" for reward, given in parts) else spec.scope


def deadline_of(rewards: Table, name: str, options: Mapping[str, Any]) -> float:
    """Seconds that a call may take: at least the sum of what its parts may."""
    entry = rewards[name]
    own = entry.value.timeout_s
    if callable(own):
        parsed = entry.parse(options, rewards.key)
        with foreign_code(f"reward={name}", "its timeout_s", error_type=ConfigError):
            own = own(parsed)
    return max(float(own), sum(deadline_of(rewards, *part) for part in (_parts(rewards, name, options) or {}).values()))


def label_check(rewards: Table, name: str, options: Mapping[str, Any]) -> Callable[[Any], None]:
    """A function that refuses labels that a reward, or a part of it, does not take: it raises ``DataError``, which names the reward."""
    entry = rewards[name]
    parsed = entry.parse(options, rewards.key)
    of_parts = [label_check(rewards, reward, given) for reward, given in (_parts(rewards, name, options) or {}).values()]

    def checked(label: Any) -> None:
        for check in of_parts:
            check(label)
        try:
            entry.value.check_label(parsed, label)
        except RlbatchError as error:
            raise DataError(f"reward={name}: {error}") from error
        except Exception as error:  # foreign code: whatever it raises must name the reward
            raise DataError(f"reward={name}: check_label raised {error_text(error)}. Correct the label or the reward.") from error

    return checked


def needs_label(rewards: Table, name: str, options: Mapping[str, Any]) -> bool:
    """Whether a reward, or a part of it, reads labels."""
    parts = _parts(rewards, name, options)
    return bool(rewards[name].value.needs_label) if parts is None else any(needs_label(rewards, *part) for part in parts.values())


def answer_reader(rewards: Table, name: str, options: Mapping[str, Any]) -> Answers:
    """A function that tells the final answers of responses that a reward scores; it raises ``RewardError``, which names the reward."""
    name, options = _answering(rewards, name, options)
    entry = rewards[name]
    parsed = entry.parse(options, rewards.key)

    def answers(samples: Sequence[Sample]) -> list[str | None]:
        with foreign_code(f"reward={name}", "its answer", error_type=RewardError):
            found = [entry.value.answer(parsed, sample) for sample in samples]
        if wrong := [answer for answer in found if not isinstance(answer, str | None)]:
            raise RewardError(f"reward={name}: its answer must be a text or None, is {type(wrong[0]).__name__}. Correct it.")
        return found

    return answers


def _answering(rewards: Table, name: str, options: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """The first of a reward and its parts that says what the answer is; else the reward."""
    if rewards[name].value.answer is whole_response:
        for part in (_parts(rewards, name, options) or {}).values():
            found = _answering(rewards, *part)
            if rewards[found[0]].value.answer is not whole_response:
                return found
    return name, options
