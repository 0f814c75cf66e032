"""No false alarm: random right models, under random layouts."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rlbatch.align.arguments import layout_of
from rlbatch.align.report.answer import answer
from rlbatch.align.report.compare import rounding
from rlbatch.align.sides.trainer import Task, TrainerSide, compute
from rlbatch.align.sides.transformers import TransformersSide
from rlbatch.align.values.places import batch_of
from rlbatch.config.hf_config import read_config
from rlbatch.registry import load_plugins
from tests import tiny_models
from tests.tiny_models import saved

MOE, DENSE = ("qwen3_moe", "deepseek_v3", "moonlight", "mixtral"), ("qwen2", "qwen3")
LAYOUTS = ("ep1", "tp2", "cp2", "pp2")
MOE_LAYOUTS = (*LAYOUTS, "ep2", "tp2+ep2", "cp2+ep2", "pp2+vpp2")


def drawn(seed: int) -> tuple[str, dict[str, Any], str]:
    """A model, what is changed of it, and a layout."""
    draw = random.Random(seed)
    model, is_right = draw.choice((*MOE, *MOE, *DENSE)), draw.random() < 0.5
    changes: dict[str, Any] = {
        "hidden_size": draw.choice((32, 48, 64)),
        "num_hidden_layers": draw.choice((4, 8)),
        "intermediate_size": draw.choice((32, 56)),
        "rms_norm_eps": draw.choice((1e-6, 1e-5)),
        "tie_word_embeddings": draw.random() < 0.3 and model in DENSE,
    }
    if model in MOE:
        changes |= {"num_experts_per_tok": draw.choice((2, 3))}
    if model in MOE and model != "mixtral":
        changes |= {"moe_intermediate_size": draw.choice((8, 24))}
    if model == "qwen3_moe":
        changes |= {"num_experts": draw.choice((4, 16)), "norm_topk_prob": is_right}
    if model == "moonlight":
        changes |= {
            "n_routed_experts": draw.choice((4, 16)),
            "norm_topk_prob": is_right,
            "routed_scaling_factor": draw.choice((1.0, 2.446)),
        }
    return model, changes, draw.choice(MOE_LAYOUTS if model in MOE else LAYOUTS)


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.long("align")) for seed in (2, 3))])
def test_nothing_is_said_of_what_is_right(seed: int, tmp_path: Path, rank_pool: Callable[[int], Any]) -> None:
    """The trainer beside transformers."""
    model, changes, layout = drawn(seed)
    folder = saved(getattr(tiny_models, model)(**changes), tmp_path)
    family = load_plugins().resolve_model_family(read_config(folder))
    draw = random.Random(seed)
    batch = batch_of([[draw.randrange(61) for _ in range(length)] for length in (23, 5, 1, 40)])
    sizes = layout_of(layout, family)
    side = TrainerSide(layout, Task(str(folder), sizes, "fp32", ()), partial(rank_pool(sizes.world_size).run, compute))
    baseline = TransformersSide(folder).compute(batch)
    found = answer(family, batch, side, baseline, side.compute(batch), rounding(folder, batch, baseline, "fp32"))
    assert found.first is None, (model, changes, layout, found.sentence(family.num_layers))
