"""What backends have in common whose engine runs in a host. The engine is a fake, in a real host."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from rlbatch.api import ConfigError, EngineLost, RolloutContext, WeightBucket
from rlbatch.config.structured import from_mapping, key_docs
from rlbatch.engines.backend.hosted import HostedOptions, check_options
from rlbatch.engines.host.inventory import refusal
from tests.hosted_plugin import hosted
from tests.stopwatch import Stopwatch


def test_a_later_sync_that_hangs_busily(tmp_path: Path, repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a worker does that waits for another in NCCL: missed after the limit for signs of life, and not after that for a first sync."""
    monkeypatch.setenv("PYTHONPATH", str(repository))
    monkeypatch.setenv("RLBATCH_TEST_FAULTS", json.dumps([["0", "load", 2, "spin"]]))
    made = hosted(RolloutContext(Path(), "cpu", "float32", folder=tmp_path / "0"), HostedOptions(hang_limit_s=2.0))
    try:
        made.update_weights([WeightBucket(["0"], [torch.ones(3)], 1)])
        watch = Stopwatch()
        with pytest.raises(EngineLost, match=r"`load_weights`: .* answers nothing for [\d.]+ s"):
            made.update_weights([WeightBucket(["0"], [torch.ones(3)], 2)])
        watch.assert_within(20.0)
    finally:
        made.close()


def test_a_start_that_was_begun_is_ended_later(tmp_path: Path, repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process is there at once, the engine starts when it is told to; one that is closed before that leaves nothing."""
    monkeypatch.setenv("PYTHONPATH", str(repository))
    for starts in (True, False):
        folder = tmp_path / str(starts)
        made = hosted(RolloutContext(Path(), "cpu", "float32", folder=folder, starts_later=True), HostedOptions())
        assert made._host is not None
        assert made._host._process.poll() is None
        assert not (folder / "reached_start").exists()
        if starts:
            made.start()
            assert (folder / "reached_start").exists()
        made.close()
        assert made._host._process.poll() is not None


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
