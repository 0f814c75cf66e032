"""``offload=weights``: what it asks of the optimizer, and says of itself. What it moves: ``offload_parts/test_host_copies.py``."""

from __future__ import annotations

from rlbatch.api import OffloadMemory, OptimizerSpec
from rlbatch.registry import load_plugins


def test_the_optimizer_stays_as_it_is() -> None:
    """Weights and gradients leave, nothing else, in both precisions."""
    registry, spec = load_plugins(), OptimizerSpec({"lr": 1.0})
    strategy, entry = registry.build_offload("weights", {}), registry.offloads["weights"]
    assert strategy.moves_weights
    assert strategy.configure_optimizer(spec) is spec
    for precision in ("fp32", "bf16"):
        assert entry.value.memory(entry.parse({}, "offload"), precision) == OffloadMemory(releases_gradients=True, moves_weights=True)
