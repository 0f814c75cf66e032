"""Values and combinations that cannot be right, whatever the model."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import yaml

from rlbatch.api import ConfigError, Range
from rlbatch.config.check import check_config
from rlbatch.config.schema import Config
from rlbatch.config.structured import KeyDoc, from_mapping, key_docs, show_value

BOUNDED = ("train", "eval", "optimizer", "algorithm", "layout", "model", "rollout", "data", "checkpoint", "cluster", "launch")


def check(overrides: list[str]) -> None:
    """Checks the schema's defaults with overrides (without Hydra: there are many cases)."""
    tree: dict[str, Any] = {}
    for override in overrides:
        key, _, text = override.partition("=")
        section, _, name = key.rpartition(".")
        target = tree.setdefault(section, {}) if section else tree
        target[name] = yaml.safe_load(text) if text else ""
    check_config(from_mapping(Config, tree))


def limits(doc: KeyDoc) -> Range:
    """The key's range."""
    return next(mark for mark in doc.marks if isinstance(mark, Range))


NUMBERS = {doc.name: doc for doc in key_docs(Config) if doc.type.startswith(("an integer", "a number"))}


FULL = ["layout.recompute_granularity=full", "layout.recompute_method=uniform", "layout.recompute_num_layers=1"]


@pytest.mark.parametrize("key", NUMBERS)
def test_numbers_have_ranges(key: str) -> None:
    """Every number of the schema says which its users can hold: what is beyond, and what is none, is refused by its key."""
    bounds, is_int = limits(NUMBERS[key]), NUMBERS[key].type.startswith("an integer")
    step = 1 if is_int else 1e-9
    below = bounds.above if bounds.above >= bounds.least else bounds.least - step
    over = bounds.below if bounds.below <= bounds.most else bounds.most * (1 if is_int else 1.0001) + step
    tried = [below, over] + ([] if is_int else [float("nan"), float("inf"), -float("inf"), 10**400])
    for value in filter(math.isfinite, tried[:2]):
        with pytest.raises(ConfigError, match=rf"^{key}={re.escape(show_value(value if is_int else float(value)))}: must be "):
            from_mapping(Config, nested(key, value))
    for value in tried[2:]:
        with pytest.raises(ConfigError, match=rf"^{key}=.*: must be a finite number\. Use e\.g\. "):
            from_mapping(Config, nested(key, value))


@pytest.mark.parametrize("key", [key for key in NUMBERS if key.partition(".")[0] in BOUNDED])
def test_ranges_have_ends(key: str) -> None:
    """1e20 and its like reach no clock, no wire format and no loop of submit's."""
    bounds = limits(NUMBERS[key])
    assert math.isfinite(max(bounds.least, bounds.above))
    assert min(bounds.most, bounds.below) <= 1e15


def nested(key: str, value: Any) -> dict[str, Any]:
    """A tree with one key."""
    section, _, rest = key.partition(".")
    return {section: nested(rest, value) if rest else value}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["train.prompts_per_step=32", "train.updates_per_step=5"], "train.updates_per_step=5: must divide train.prompts_per_step (32)"),
        (["train.prompts_per_step=32", "train.updates_per_step=5"], "Use 2, 4 or 8."),
        (["train.prompts_per_step=4", "train.updates_per_step=9"], "Use 2 or 4."),
        (["train.spec=transformer_engine"], "train.spec=transformer_engine: its attention over packs has no fp32 kernels"),
        (["optimizer.lr=1.0e-6", "optimizer.min_lr=1.0e-5"], "optimizer.min_lr=1e-05: must be at most optimizer.lr (1e-06)"),
        (
            ["algorithm.routing_replay=recorded", "algorithm.old_logprobs=rollout", "train.updates_per_step=2"],
            "algorithm.routing_replay=recorded: records the pass for old log-probs, which algorithm.old_logprobs=rollout leaves out. ",
        ),
        (
            ["algorithm.routing_replay=recorded"],
            "algorithm.routing_replay=recorded: has an effect on updates after a step's first",
        ),
        (["optimizer.beta1=1"], "optimizer.beta1=1.0: must be less than 1."),
        (["optimizer.lr=1.0e+20"], "optimizer.lr=1e+20: must be 1e+15 or less. Use e.g. 1e-06."),
        (["optimizer.eps=1.0e-50"], "optimizer.eps=1e-50: must be 1e-37 or more. Use e.g. 1e-08."),
        (["optimizer.clip_grad=1.0e-50"], "optimizer.clip_grad=1e-50: must be 0, or 1e-30 or more: float32 makes it 0. Use e.g. 1.0."),
        (["optimizer.lr=1.0e-45", "optimizer.min_lr=0"], "optimizer.lr=1e-45: must be 0, or 1e-30 or more"),
        (["optimizer.lr=0.1", "optimizer.weight_decay=10"], "optimizer.weight_decay=10.0: times optimizer.lr (0.1) must be less than 1"),
        (["train.eval_temperature=1.0e-40"], "train.eval_temperature=1e-40: must be 0, or 0.001 or more"),
        (
            ["train.logprob_chunk_tokens=100000000000000000000"],
            "train.logprob_chunk_tokens=100000000000000000000: must be 2147483647 or less",
        ),
        (["seed=9223372036854775808"], "seed=9223372036854775808: must be 9223372036854775807 or less"),
        (["algorithm.kl_reward_coef=1.0e+20"], "algorithm.kl_reward_coef=1e+20: must be 1e+15 or less"),
        (["algorithm.eps_clip=1"], "algorithm.eps_clip=1.0: must be less than 1"),
        (["algorithm.kl_loss_coef=0.1"], "algorithm.kl_loss_coef=0.1: has an effect only with algorithm.kl_loss=true."),
        (["layout.recompute_granularity=full"], "layout.recompute_method=null: must be set with layout.recompute_granularity=full."),
        (["layout.recompute_granularity=full", "layout.recompute_method=block"], "layout.recompute_num_layers=null: must be set"),
        (
            ["layout.recompute_granularity=selective", "layout.recompute_method=block"],
            "layout.recompute_method=block: has an effect only with",
        ),
        (
            ["layout.recompute_modules=[moe]"],
            "layout.recompute_modules=[moe]: has an effect only with layout.recompute_granularity=selective, which is null.",
        ),
        (
            ["layout.recompute_granularity=selective", "layout.recompute_modules=[moe,moe]"],
            "layout.recompute_modules=[moe,moe]: must name each once.",
        ),
        (
            ["layout.recompute_granularity=selective", "layout.recompute_modules=[moe]", "algorithm.routing_replay=rollout"],
            "would ask a layer's router twice for a pack",
        ),
        (["layout.offload_modules=[experts,experts]"], "layout.offload_modules=[experts,experts]: must name each once."),
        (
            ["layout.offload_modules=[experts]", *FULL],
            "layout.offload_modules=[experts]: with layout.recompute_granularity=full nothing of a layer is kept that could leave.",
        ),
        (
            ["layout.offload_modules=[experts]", "layout.recompute_granularity=selective", "layout.recompute_modules=[mlp,moe]"],
            "layout.offload_modules=[experts]: experts cannot leave where layout.recompute_modules has moe, which drops its values itself.",
        ),
        (
            ["layout.offload_modules=[attention]", "layout.recompute_granularity=selective", "layout.recompute_modules=[layernorm]"],
            "attention cannot leave where layout.recompute_modules has layernorm",
        ),
        (
            ["layout.recompute_num_layers=1"],
            "layout.recompute_num_layers=1: has an effect only with layout.recompute_granularity=full, which is null.",
        ),
        (["checkpoint.export_interval=5"], "checkpoint.export_interval=5: has an effect only with checkpoint.export_hf=true."),
        (["checkpoint.save_interval=-2"], "checkpoint.save_interval=-2: must be -1 or more. Use e.g. 0."),
        (["layout.world_size=1048577"], "layout.world_size=1048577: must be 1048576 or less. Use e.g. 2."),
        (["launch.start_limit_s=1.0e+20"], "launch.start_limit_s=1e+20: must be 2000000 or less. Use e.g. 3600.0."),
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
        ["algorithm.kl_loss=true", "algorithm.kl_loss_coef=0"],
        FULL,
        ["layout.recompute_granularity=selective"],
        ["layout.recompute_granularity=selective", "layout.recompute_modules=[moe]", "layout.offload_modules=[attention]"],
        ["layout.recompute_granularity=selective", "layout.recompute_modules=[layernorm,moe]"],
        ["train.eval_temperature=0", "checkpoint.save_interval=-1"],
    ],
)
def test_accepted_combinations(overrides: list[str]) -> None:
    """What is unusual but right is accepted."""
    check(overrides)
