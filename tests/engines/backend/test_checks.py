"""Refusals of ``rollout.options`` and ``rollout.engine``, before anything starts."""

from __future__ import annotations

import math
from typing import Any

import pytest

from rlbatch.api import ConfigError
from rlbatch.config.structured import from_mapping, key_docs
from rlbatch.engines.backend.hosted import HostedOptions, check_options
from rlbatch.engines.host.inventory import refusal


def test_the_defaults_are_accepted() -> None:
    """And so are numbers as values of variables."""
    check_options(HostedOptions(), {"python": "python3", "environment": {"A": 1, "B": "text", "C": True}})


NUMBERS = {doc.name: doc for doc in key_docs(HostedOptions) if doc.type in ("an integer", "a number")}


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name, doc in NUMBERS.items() for value in (-1, 1e20, math.nan) if doc.type == "a number" or value < 0],
)
def test_numbers_have_ranges(name: str, value: float) -> None:
    """The error names the key, its value and its default."""
    said = rf"rollout\.options\.{name}=\S+: must be .*\. Use e\.g\. {getattr(HostedOptions(), name)}\."
    with pytest.raises(ConfigError, match=said):
        from_mapping(HostedOptions, {name: value}, "rollout.options.")


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        ({"python": 3}, "rollout.engine.python=3: must be the path"),
        ({"python": None}, "rollout.engine.python=None: must be the path"),
        ({"environment": [1]}, "rollout.engine.environment=[1]: must map"),
        ({"environment": {"A": {"b": 1}}}, "rollout.engine.environment={A: {'b': 1}}: must map"),
        ({"environment": {"A": None}}, "rollout.engine.environment={A: None}: must map"),
        ({"environment": {"A=B": "x"}}, "rollout.engine.environment={A=B: x}: must map"),
        ({"environment": {"": "x"}}, "rollout.engine.environment={: x}: must map"),
        ({"environment": {"PYTHONPATH": "/x"}}, "rollout.engine.environment={PYTHONPATH: /x}: rlbatch sets this variable."),
        ({"environment": {"A": "x\0y"}}, "rollout.engine.environment={A: x\0y}: must map"),
    ],
)
def test_our_keys_are_checked(engine: dict[str, Any], said: str) -> None:
    """What no process could be started with is refused with the key."""
    with pytest.raises(ConfigError) as told:
        check_options(HostedOptions(), engine)
    assert str(told.value).startswith(said)


def test_options_of_an_engine() -> None:
    """A decided one names the key, an unknown one what is close; where the engine's names are not known all are taken."""
    decided = {"model": "model.hf"}
    assert refusal({"depth": 1}, ["depth"], decided, "toy 1.0", "`toy --help`") == ""
    assert refusal({"depht": 1}, [], decided, "toy 1.0", "`toy --help`") == ""
    assert refusal({"model": "x"}, [], decided, "toy 1.0", "`toy --help`") == "rollout.engine.model=x: model.hf decides it. Leave it out."
    told = "rollout.engine.depht=1: toy 1.0 has no such option. "
    assert refusal({"depht": 1}, ["depth"], decided, "toy 1.0", "`toy --help`") == told + "Did you mean `depth`?"
    assert refusal({"depht": 1}, ["width"], decided, "toy 1.0", "`toy --help`") == told + "See `toy --help`."
