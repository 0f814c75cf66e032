"""Gradients by Hugging Face name do not depend on how the model and the batch are spread over ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlbatch.config.schema import LayoutConfig
from tests import tiny_models
from tests.megatron.gradients import gradients

TOLERANCE = 1e-5
LAYOUTS = {
    "dp2": LayoutConfig(world_size=2),
    "ep2": LayoutConfig(world_size=2, ep_size=2),
    "pp2": LayoutConfig(world_size=2, pp_size=2),
    "pp2 uneven": LayoutConfig(world_size=2, pp_size=2, first_stage_layers=1),
    "vpp2 pp2": LayoutConfig(world_size=2, pp_size=2, vpp_size=2),
    "tp2 etp2": LayoutConfig(world_size=2, tp_size=2, etp_size=2),
    "tp2 ep2": LayoutConfig(world_size=2, tp_size=2, ep_size=2),
    "tp2": LayoutConfig(world_size=2, tp_size=2),
    "cp2": LayoutConfig(world_size=2, cp_size=2),
    "recompute": LayoutConfig(world_size=2, recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1),
    "pp2 ep2": LayoutConfig(world_size=4, pp_size=2, ep_size=2),
    "pp4": LayoutConfig(world_size=4, pp_size=4),
    "vpp2 pp2 ep2": LayoutConfig(world_size=4, pp_size=2, vpp_size=2, ep_size=2),
    "ep4": LayoutConfig(world_size=4, ep_size=4),
    "tp2 pp2 ep2": LayoutConfig(world_size=4, tp_size=2, pp_size=2, ep_size=2),
    "tp2 cp2 ep2": LayoutConfig(world_size=4, tp_size=2, cp_size=2, ep_size=2),
    "pp2 cp2": LayoutConfig(world_size=4, pp_size=2, cp_size=2),
}


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """L2 norm of the difference over the norm of the reference."""
    return float((got - want).norm() / want.norm().clamp(min=1e-12))


def worst(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> tuple[float, str]:
    """The largest relative error and its parameter."""
    assert set(got) == set(want)
    return max((relative_error(got[name], want[name]), name) for name in want)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.saved(tiny_models.qwen3_moe(), tmp_path_factory.mktemp("qwen3_moe"))


@pytest.fixture(scope="module")
def reference(folder: Path, rank_pool) -> dict[str, dict[str, torch.Tensor]]:
    """One process, everything in one pack."""
    one = LayoutConfig(world_size=1)
    return {kind: rank_pool(1).run(gradients, str(folder), one, 1000, kind)[0] for kind in ("token_mean", "sequence_mean")}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_layouts_give_the_gradient_of_one_process(layout: LayoutConfig, folder: Path, reference, rank_pool) -> None:
    """Per-parameter relative L2 error of at most 1e-5, with sequence packing."""
    got = rank_pool(layout.world_size).run(gradients, str(folder), layout, 40, "token_mean")[0]
    error, name = worst(got, reference["token_mean"])
    assert error <= TOLERANCE, f"{name}: {error:.2e}"


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
@pytest.mark.parametrize("max_tokens", [1, 23, 37])
def test_packs_give_the_gradient_of_one_pack(max_tokens: int, aggregation: str, folder: Path, reference, rank_pool) -> None:
    """Any max_tokens_per_gpu, down to one sample a pack, over two data-parallel ranks with unequal numbers of packs."""
    got = rank_pool(2).run(gradients, str(folder), LayoutConfig(world_size=2), max_tokens, aggregation)[0]
    error, name = worst(got, reference[aggregation])
    assert error <= TOLERANCE, f"{name}: {error:.2e}"


def test_uneven_stages_of_a_deep_pipeline(rank_pool, tmp_path: Path) -> None:
    """Four stages of 1, 2, 2 and 1 layers give the gradient of one process."""
    folder = tiny_models.saved(tiny_models.qwen3_moe(num_hidden_layers=6), tmp_path / "six layers")
    want = rank_pool(1).run(gradients, str(folder), LayoutConfig(world_size=1), 1000, "token_mean")[0]
    layout = LayoutConfig(world_size=4, pp_size=4, first_stage_layers=1, last_stage_layers=1)
    error, name = worst(rank_pool(4).run(gradients, str(folder), layout, 40, "token_mean")[0], want)
    assert error <= TOLERANCE, f"{name}: {error:.2e}"
