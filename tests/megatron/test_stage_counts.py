"""The layout check and the plan's counts beside Megatron itself: random layouts of small models, built on the meta device."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from rlbatch.api import ConfigError, ModelFamily
from rlbatch.config.schema import LayoutConfig
from rlbatch.megatron.stage_counts import stage_counts
from rlbatch.plan.layout import check_layout
from rlbatch.plan.parameters import ModelSize
from rlbatch.registry import load_plugins
from tests.megatron.real_models import CONFIGS

STRICTER = (
    "with ep_size 1 it must equal tp_size",  # gradients would be wrong
    "must divide num_query_groups",  # key-value heads would be on several ranks
    "must divide moe_ffn_hidden_size",  # rows of an expert would be left out
    "has an effect only with pp_size > 1",  # it would have none
    "has 0 experts",  # neither would this
    "has equal stages",  # of an interleaved pipeline, as its layers are counted
)
"""Rules of what Megatron would build."""
SIZES: dict[str, tuple[Any, ...]] = {
    "world_size": (1, 2, 4, 6, 8, 12, 16, 24, 32, 64),
    "tp_size": (1, 2, 3, 4, 8),
    "pp_size": (1, 2, 3, 4, 10),
    "cp_size": (1, 2),
    "ep_size": (1, 2, 3, 4, 8),
    "etp_size": (1, 2, 3, 4),
    "vpp_size": (1, 2, 3),
    "first_stage_layers": (None, None, None, 1, 2, 3),
    "last_stage_layers": (None, None, None, 1, 2, 3),
}
REFUSALS = (AssertionError, RuntimeError, ValueError, ZeroDivisionError)
REGISTRY = load_plugins()


def random_job(draw: random.Random) -> tuple[ModelFamily, LayoutConfig]:
    """A model of 4 to 9 layers, dense or with experts, and a layout that is accepted; mostly, a size of it is then changed."""
    name, layers = draw.choice(["Qwen3-30B-A3B", "DeepSeek-V3", "Qwen3-0.6B"]), draw.randint(4, 9)
    dense_first = {"first_k_dense_replace": draw.choice([0, 1, 3])} if name == "DeepSeek-V3" else {}
    family = REGISTRY.resolve_model_family({**CONFIGS[name], "num_hidden_layers": layers, **dense_first})
    while refusal(family, layout := LayoutConfig(**{size: draw.choice(values) for size, values in SIZES.items()})):
        pass
    size = draw.choice(list(SIZES))
    return family, replace(layout, **{size: draw.choice(SIZES[size])} if draw.random() < 0.7 else {})


def refusal(family: ModelFamily, layout: LayoutConfig) -> str:
    """What the layout check says; empty: nothing."""
    try:
        check_layout(layout, family, on_gpu=False)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("seed", "layouts"), [(0, 100), pytest.param(1, 1000, marks=pytest.mark.long("models", "configs"))])
def test_random_layouts(seed: int, layouts: int) -> None:
    """What is accepted Megatron builds, with as many parameters on each stage; what is refused it refuses too, rules aside
    that are stricter on purpose.
    """
    draw, seen = random.Random(seed), Counter[str]()
    for _ in range(layouts):
        family, layout = random_job(draw)
        said = refusal(family, layout)
        try:
            built = stage_counts(family, layout)
        except REFUSALS as error:
            assert said, f"{family.name} {layout}: accepted, and Megatron says {error}"
            seen["refused by both"] += 1
            continue
        stricter = any(rule in said for rule in STRICTER)
        assert not said or stricter, f"{family.name} {layout}: Megatron builds it, refused: {said}"
        seen["stricter" if said else "accepted"] += 1
        if not said:
            assert built == [(share.held, share.experts) for share in ModelSize(family).shares(layout)], f"{family.name} {layout}"
    assert min(seen["accepted"], seen["refused by both"]) >= layouts // 5, seen
