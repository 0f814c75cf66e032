"""A checkpoint of any layout goes on under another: weights, main weights, moments and step counts are resharded."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlbatch.config.schema import LayoutConfig
from tests import tiny_models
from tests.megatron import checkpoint
from tests.megatron.test_gradients import LAYOUTS, TOLERANCE, worst

ONE = LayoutConfig(world_size=1)
SHAPES = ["vpp2 pp2", "ep4", "tp2 pp2 ep2", "tp2 cp2 ep2"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.saved(tiny_models.qwen3_moe(), tmp_path_factory.mktemp("qwen3_moe"))


@pytest.fixture(scope="module")
def one_rank(folder: Path, tmp_path_factory: pytest.TempPathFactory, rank_pool):
    """The third update of one process, and its checkpoint after the second."""
    state = tmp_path_factory.mktemp("one") / "state"
    return (*rank_pool(1).run(checkpoint.save_between_updates, str(folder), ONE, str(state))[0], state)


@pytest.mark.parametrize("name", SHAPES)
def test_from_one_rank_to_many_and_back(name: str, folder: Path, one_rank, tmp_path: Path, rank_pool) -> None:
    """The third update, after a load from one rank's checkpoint and after a load of the layout's own on one rank, is that of one process:
    gradient norm and weights within 1e-5, while the update moves the weights far more.
    """
    want, report, state = one_rank
    layout = LAYOUTS[name]
    pool = rank_pool(layout.world_size)
    loaded = pool.run(checkpoint.load_and_update, str(folder), layout, str(state))
    pool.run(checkpoint.save_between_updates, str(folder), layout, str(tmp_path / "state"))
    back = rank_pool(1).run(checkpoint.load_and_update, str(folder), ONE, str(tmp_path / "state"))
    for ranks in (loaded, back):
        weights, got, _ = ranks[0]
        error, parameter = worst(weights, want)
        assert error <= TOLERANCE, f"{parameter}: {error:.2e}"
        assert got["grad_norm"] == pytest.approx(report["grad_norm"], rel=TOLERANCE)
        assert {step for _, _, steps in ranks for step in steps} == {3.0}


def test_an_update_is_seen(folder: Path, one_rank, rank_pool) -> None:
    """The tolerance of the comparison is far below what updates change."""
    want, _, _ = one_rank
    fresh, _ = rank_pool(1).run(checkpoint.first_update, str(folder), ONE)[0]
    assert worst(fresh, want)[0] > 100 * TOLERANCE
