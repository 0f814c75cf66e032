"""Nothing that is infinite or NaN moves the optimizer, and whatever becomes so is named, alike on every rank."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from rlbatch.config.schema import LayoutConfig
from tests import tiny_models
from tests.megatron.finite import overflowing, poisoned, spoiled_state

ONE, DP2 = LayoutConfig(world_size=1), LayoutConfig(world_size=2)
EP2, PP2 = LayoutConfig(world_size=2, ep_size=2), LayoutConfig(world_size=2, pp_size=2)
TP2 = LayoutConfig(world_size=2, tp_size=2, etp_size=2)
NORM, EXPERTS = "decoder.layers.0.input_layernorm.weight", "decoder.layers.1.mlp.experts.down"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_models.saved(tiny_models.qwen3_moe(), tmp_path_factory.mktemp("model")))


@pytest.mark.parametrize(
    ("layout", "name", "rank", "value", "told"),
    [
        (ONE, NORM, 0, math.nan, "model.layers.0.input_layernorm.weight (layer 0, rank 0), 1 of "),
        (ONE, "embedding.word_embeddings.weight", 0, math.inf, "model.embed_tokens.weight (rank 0), 1 of "),
        (ONE, NORM, 0, 1e30, "model.layers.0.input_layernorm.weight, with gradients of up to "),
        (DP2, "output_layer.weight", 1, -math.inf, "lm_head.weight (rank "),
        (EP2, EXPERTS, 1, math.nan, "down_proj.weight (layer 1, rank 1), 1 of "),
        (PP2, NORM, 0, math.nan, "model.layers.0.input_layernorm.weight (layer 0, rank 0), 1 of "),
        (TP2, NORM, 1, math.nan, "model.layers.0.input_layernorm.weight (layer 0, rank "),
    ],
)
def test_a_gradient_that_is_not_finite(layout: LayoutConfig, name: str, rank: int, value: float, told: str, folder: str, rank_pool) -> None:
    """One value on one rank, of dense parameters, experts and copies: every rank refuses with the same words, and nothing has moved."""
    answers = rank_pool(layout.world_size).run(poisoned, folder, layout, name, rank, value)
    assert len({found for found, _, _ in answers}) == 1
    for found, is_same, after in answers:
        assert " (the backward pass came first to model" in found or " (the backward pass came first to lm_head" in found
        assert told in found
        assert is_same
        assert after == ""


@pytest.mark.parametrize("layout", [ONE, EP2, PP2], ids=["1 rank", "ep2", "pp2"])
def test_weights_that_become_infinite(layout: LayoutConfig, folder: str, rank_pool) -> None:
    """A learning rate that float32 cannot add: refused by the update that makes the weights, or by the next one, on every rank alike."""
    answers = rank_pool(layout.world_size).run(overflowing, folder, layout, 3e38 * 0.1)
    assert len(set(answers)) == 1
    first, second = answers[0]
    assert "weights must stay finite" in first or "its loss is" in second


def test_state_that_is_not_finite_is_not_resumed(folder: str, rank_pool, tmp_path: Path) -> None:
    """An infinite moment of an expert in a checkpoint, named with the expert."""
    messages = rank_pool(2).run(spoiled_state, folder, EP2, EXPERTS, "exp_avg_sq", str(tmp_path))
    assert len(set(messages)) == 1
    assert "mlp.experts." in messages[0]
    assert "exp_avg_sq. Name an earlier checkpoint in latest.json." in messages[0]
