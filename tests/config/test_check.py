"""Values and combinations that cannot be right, whatever the model."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from rlbatch.api import ConfigError
from rlbatch.config.check import NOT_NEGATIVE, POSITIVE, check_config
from rlbatch.config.convert import from_mapping
from rlbatch.config.schema import Config


def check(overrides: list[str]) -> None:
    """Checks the schema's defaults with overrides (without Hydra: there are many cases)."""
    tree: dict[str, Any] = {}
    for override in overrides:
        key, _, text = override.partition("=")
        section, _, name = key.rpartition(".")
        target = tree.setdefault(section, {}) if section else tree
        target[name] = yaml.safe_load(text) if text else ""
    check_config(from_mapping(Config, tree))


@pytest.mark.parametrize("key", POSITIVE)
@pytest.mark.parametrize("value", [0, -1])
def test_positive_keys(key: str, value: int) -> None:
    """Counts and sizes below 1 are refused."""
    with pytest.raises(ConfigError, match=rf"^{key}={value}(\.0)?: must be greater than 0\. Use e\.g\. "):
        check([f"{key}={value}"])


@pytest.mark.parametrize("key", NOT_NEGATIVE)
def test_not_negative_keys(key: str) -> None:
    """Coefficients and intervals below 0 are refused."""
    with pytest.raises(ConfigError, match=rf"^{key}=-1(\.0)?: must be 0 or more\. Use e\.g\. "):
        check([f"{key}=-1"])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["train.prompts_per_step=32", "train.updates_per_step=5"], "train.updates_per_step=5: must divide train.prompts_per_step (32)"),
        (["train.prompts_per_step=32", "train.updates_per_step=5"], "Use 4 or 8."),
        (["train.prompts_per_step=4", "train.updates_per_step=9"], "Use 4."),
        (["train.spec=transformer_engine"], "train.spec=transformer_engine: its attention over packs has no fp32 kernels"),
        (["optimizer.lr=1.0e-6", "optimizer.min_lr=1.0e-5"], "optimizer.min_lr=1e-05: must be at most optimizer.lr (1e-06)"),
        (["optimizer.beta1=1"], "optimizer.beta1=1.0: must be less than 1."),
        (["algorithm.eps_clip=1"], "algorithm.eps_clip=1.0: must be less than 1"),
        (["algorithm.group_size=1"], "algorithm.group_size=1: algorithm.advantage=grpo compares the samples of a prompt"),
        (["algorithm.kl_loss_coef=0.1"], "algorithm.kl_loss_coef=0.1: has an effect only with algorithm.kl_loss=true."),
        (["layout.recompute_granularity=full"], "layout.recompute_method=null: must be set with layout.recompute_granularity=full."),
        (["layout.recompute_granularity=full", "layout.recompute_method=block"], "layout.recompute_num_layers=null: must be set"),
        (
            ["layout.recompute_granularity=selective", "layout.recompute_method=block"],
            "layout.recompute_method=block: has an effect only with",
        ),
        (
            ["layout.recompute_num_layers=1"],
            "layout.recompute_num_layers=1: has an effect only with layout.recompute_granularity=full, which is null.",
        ),
        (["checkpoint.export_interval=5"], "checkpoint.export_interval=5: must be 0 (after the last step only) or more, and is of"),
        (["checkpoint.export_interval=-1", "checkpoint.export_hf=true"], "checkpoint.export_interval=-1: must be 0"),
        (["checkpoint.save_interval=-2"], "checkpoint.save_interval=-2: must be -1 (never), 0 (after the last step) or more."),
        (["model.hf="], "model.hf=: must not be empty."),
        (["data.train="], "data.train=: must not be empty."),
        (["rollout.name="], "rollout.name=: must not be empty."),
    ],
)
def test_refused_combinations(overrides: list[str], message: str) -> None:
    """Keys that contradict each other are refused, naming both."""
    with pytest.raises(ConfigError) as caught:
        check(overrides)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "overrides",
    [
        ["optimizer.lr=0", "optimizer.min_lr=0"],
        ["train.prompts_per_step=32", "train.updates_per_step=8"],
        ["train.spec=transformer_engine", "train.precision=bf16"],
        ["algorithm.group_size=1", "algorithm.advantage=reinforce_plus_plus"],
        ["algorithm.kl_loss=true", "algorithm.kl_loss_coef=0"],
        ["layout.recompute_granularity=full", "layout.recompute_method=uniform", "layout.recompute_num_layers=1"],
        ["layout.recompute_granularity=selective"],
        ["train.eval_temperature=0", "checkpoint.save_interval=-1"],
    ],
)
def test_accepted_combinations(overrides: list[str]) -> None:
    """What is unusual but right is accepted."""
    check(overrides)
