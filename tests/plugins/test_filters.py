"""The built-in group filters."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlbatch.api import ConfigError, PluginError, SampleGroup
from rlbatch.config.compose import compose
from rlbatch.registry import compose_job, load_plugins


def group(rewards: list[float], lengths: list[int] | None = None, cut: int = 0) -> SampleGroup:
    """The first ``cut`` responses were cut."""
    samples: Any = [
        SimpleNamespace(response_length=length, finish_reason="length" if place < cut else "stop")
        for place, length in enumerate(lengths or [3] * len(rewards))
    ]
    return SampleGroup(SimpleNamespace(prompt_id=0), samples, rewards)  # type: ignore[arg-type]


def keeps(name: str, given: SampleGroup, **options: float) -> bool:
    config = compose([f"sampling.filters=[{name}]", *(f"sampling.filter_options.{name}.{key}={value}" for key, value in options.items())])
    return load_plugins().build_filters(config)[name](given)


@pytest.mark.parametrize(
    ("rewards", "min_std", "kept"),
    [
        ([1.0, 1.0, 1.0], 0, False),
        ([0.1 + 0.2] * 5, 0, False),  # whose mean is not exactly that
        ([0.0, 0.0], 0, False),
        ([0.0, 1.0], 0, True),
        ([1e8, 1e8 + 1e-7], 0, True),
        ([0.0, 1.0], 0.5, False),
        ([0.0, 1.0], 0.49, True),
    ],
)
def test_reward_spread(rewards: list[float], min_std: float, kept: bool) -> None:
    """Equal rewards are exactly equal; a threshold is one that must be exceeded."""
    assert keeps("reward_spread", group(rewards), min_std=min_std) == kept


@pytest.mark.parametrize(("rewards", "kept"), [([0, 0, 0, 0], False), ([0, 0, 0, 1], False), ([0, 1, 0, 1], True), ([1, 1, 1, 1], False)])
def test_accuracy(rewards: list[float], kept: bool) -> None:
    """The mean reward is in the band, whose bounds are in it."""
    assert keeps("accuracy", group([float(reward) for reward in rewards]), low=0.5, high=0.75) == kept


@pytest.mark.parametrize(
    ("lengths", "cut", "options", "kept"),
    [
        ([4, 8], 0, {"max_mean": 6}, True),
        ([4, 9], 0, {"max_mean": 6}, False),
        ([4, 8], 0, {"min_mean": 7}, False),
        ([9, 9], 1, {"max_truncated": 0.5}, True),
        ([9, 9], 2, {"max_truncated": 0.5}, False),
        ([9, 9], 2, {}, True),
    ],
)
def test_length(lengths: list[int], cut: int, options: dict[str, float], kept: bool) -> None:
    """Of the mean length and of the share that was cut."""
    assert keeps("length", group([0.0, 1.0], lengths, cut), **options) == kept


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["sampling.filters=[reward_spred]"], r"sampling\.filters=\[reward_spred\]: unknown\. Did you mean `reward_spread` "),
        (
            ["sampling.filters=[reward_spread]", "algorithm.group_size=1", "algorithm.advantage=reinforce_plus_plus"],
            r"algorithm\.group_size=1: sampling\.filters=\[reward_spread\] compares .* needs at least 2\. Use e\.g\. 8",
        ),
        (
            ["sampling.filters=[length,length]"],
            r"sampling\.filters=\[length,length\]: must name each filter once\. Use sampling\.filters=\[length\]",
        ),
        (
            ["sampling.filter_options.accuracy.low=0.2"],
            r"sampling\.filter_options\.accuracy: has an effect only with that filter\. Set sampling\.filters=\[accuracy\], or",
        ),
        (
            ["sampling.filters=[accuracy]", "sampling.filter_options.accuracy.lo=0.2"],
            r"sampling\.filter_options\.accuracy\.lo: unknown key\. Did you mean `sampling\.filter_options\.accuracy\.low`",
        ),
        (
            ["sampling.filters=[accuracy]", "sampling.filter_options.accuracy.low=0.5_5.0"],
            r"accuracy\.low=0\.5_5\.0: must be one number, without `_`\. Use sampling\.filter_options\.accuracy\.low=0\.5 \S+\.high=5\.0\.",
        ),
        (
            ["sampling.filters=[accuracy]", "sampling.filter_options.accuracy.low=0.9", "sampling.filter_options.accuracy.high=0.1"],
            r"sampling\.filter_options\.accuracy of sampling\.filters=\[accuracy\]: low \(0\.9\) must be at most high \(0\.1\)",
        ),
        (
            ["sampling.filters=[accuracy]", "sampling.filter_options.accuracy=0.5"],
            r"sampling\.filter_options\.accuracy=0\.5: is a group of keys",
        ),
        (["sampling.oversampling=0.5"], r"sampling\.oversampling=0\.5: must be 1 or more\. Use e\.g\. 1\.0"),
        (["sampling.oversampling=1.5_2"], r"sampling\.oversampling=1\.5_2: must be one number, without `_`"),
        (["sampling.max_rounds=0"], r"sampling\.max_rounds=0: must be greater than 0"),
        (["sampling.on_shortage=fail"], r"sampling\.on_shortage=fail: must be `train`, `skip` or `stop`"),
        (["sampling.max_version_lag=2"], r"sampling\.max_version_lag=2: has an effect only with sampling\.oversampling above 1 or"),
        (["sampling.partial_tokens=2"], r"sampling\.partial_tokens=2: has an effect only with sampling\.oversampling above 1"),
        (
            ["sampling.partial_tokens=4", "sampling.oversampling=2"],
            r"sampling\.partial_tokens=4: must be less than rollout\.max_response_tokens \(4\), of which it is a part\. Use e\.g\. 1\.",
        ),
        (
            ["sampling.partial_tokens=2", "sampling.oversampling=2", "sampling.max_version_lag=1", "train.updates_per_step=2"],
            r"sampling\.max_version_lag=1: a step makes 2 updates .* Use 2 or more\.",
        ),
        (["sampling.old_tokens=mask"], r"sampling\.old_tokens=mask: has an effect only with sampling\.partial_tokens"),
        (
            [
                "sampling.partial_tokens=2",
                "sampling.oversampling=2",
                "rollout=vllm",
                "rollout.options.min_response_tokens=2",
                "rollout.max_logprob_diff=null",
            ],
            r"rollout\.options\.min_response_tokens=2: is counted in each part of a response",
        ),
    ],
)
def test_bad_input(overrides: list[str], message: str) -> None:
    """One message, with key, value and what is right."""
    with pytest.raises((ConfigError, PluginError), match=message):
        compose_job(overrides)


def test_parts_need_an_engine_that_goes_on(tmp_path: Path) -> None:
    """A backend that does not say so would give all responses of a prompt the same random numbers."""
    path = tmp_path / "mine.py"
    hook = "def rlbatch_register_rollout_backends():\n    return {'mine': lambda context: None}\n"
    path.write_text(f"from rlbatch.api import hookimpl\n\n@hookimpl\n{hook}")
    with pytest.raises(ConfigError, match=r"sampling\.partial_tokens=2: rollout=mine does not say .* Use rollout=\w+ or "):
        compose_job([f"plugins=['{path}']", "rollout=mine", "sampling.partial_tokens=2", "sampling.oversampling=2"])
