"""``offload=optimizer_state``: what it asks of the optimizer, and says of itself. What it moves: ``offload_parts/test_host_copies.py``."""

from __future__ import annotations

from rlbatch.api import OptimizerSpec
from rlbatch.registry import load_plugins


def test_the_optimizer_is_built_as_without_it() -> None:
    """On CPUs too, where it is not refused; weights stay unless they are asked for."""
    registry, spec = load_plugins(), OptimizerSpec({"lr": 1.0})
    assert not registry.offloads["optimizer_state"].value.needs_gpu
    for options, moves_weights in (({}, False), ({"weights": True}, True)):
        strategy = registry.build_offload("optimizer_state", options)
        assert strategy.configure_optimizer(spec) is spec
        assert strategy.moves_weights is moves_weights
