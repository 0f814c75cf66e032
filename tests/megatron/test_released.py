"""Gradients that give their memory back between updates, weights and optimizer state that leave: nothing else changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import tiny_models
from tests.megatron import released
from tests.megatron.test_gradients import LAYOUTS

LONG = pytest.mark.long("models")
CASES = (
    ("dp2", "fp32"),
    *(pytest.param(layout, "fp32", marks=LONG) for layout in ("ep2", "vpp2 pp2", "tp2 etp2", "cp2")),
    *(pytest.param(layout, "fp32", marks=LONG) for layout in ("tp2 ep2 etp2", "tp2 pp2 ep2", "tp2 cp2 ep2")),
    pytest.param("dp2", "bf16", marks=LONG),
    ("vpp2 pp2 ep2", "bf16"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.saved(tiny_models.qwen3_moe(), tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize(("layout", "precision"), CASES)
def test_updates_are_bitwise_those_of_gradients_that_stay(layout: str, precision: str, folder: Path, rank_pool) -> None:
    """Losses, gradient norms, log-probs, weights, main weights and moments after six updates, on every rank. The buffers of dense
    parameters and of experts have no storage at all from before the engine starts to the first backward pass, and between later steps.
    """
    spread = LAYOUTS[layout]
    for differing, held, kept in rank_pool(spread.world_size).run(released.compared, str(folder), spread, precision):
        assert differing == []
        assert held["start"] == held["generating"] == held["logprobs"] == {0}
        assert held["updated"] == kept["updated"] == kept["start"]
        assert min(kept["start"]) > 0


def test_released_gradients_are_zeros(folder: Path, rank_pool) -> None:
    """Whoever reads them between release and the next backward pass gets zeros; releasing twice is releasing."""
    ((before, after),) = rank_pool(1).run(released.exported_after_release, str(folder))
    assert before > 0
    assert after == 0


MOVING = [("optimizer_state", {}), ("weights", {}), ("optimizer_state", {"weights": True})]


@pytest.mark.parametrize(("layout", "precision"), [("ep2", "bf16"), pytest.param("dp2", "fp32", marks=LONG)])
def test_updates_are_bitwise_those_of_memory_that_stays(layout: str, precision: str, folder: Path, rank_pool) -> None:
    """The same with main weights and moments, weights, or both away while an engine would generate: none of theirs stays, all of the
    others' does. In fp32 the weights are their own main weights. The host's memory is of exact size, though moments come later.
    """
    spread = LAYOUTS[layout]
    for kept, state, weights, both in rank_pool(spread.world_size).run(released.moved, str(folder), spread, precision, MOVING):
        assert kept[0] == state[0] == weights[0] == both[0] == []
        assert state[1] == [(size, 0) for size, _ in kept[1]]
        assert weights[1] == [(0, size) for _, size in kept[1]]
        assert both[1] == [(0, 0)] * released.UPDATES
        assert min(size for size, _ in kept[1]) > 0
        assert kept[1][-1][1] > kept[1][0][1]  # moments came with the first update
        _, weight_bytes, state_bytes = kept[2]
        assert [each[2][0] for each in (kept, state, weights, both)] == [0, state_bytes, weight_bytes, weight_bytes + state_bytes]
