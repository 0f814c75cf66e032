"""``offload=gradients``: when it gives the gradients' memory back, as the strategies do that move the optimizer. What that changes is
tested with real ones (``tests/megatron/test_released.py``).
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch

from rlbatch.api import OptimizerSpec
from rlbatch.registry import compose_job, load_plugins


class Handles:
    """Counts."""

    def __init__(self) -> None:
        self.releases = 0

    def optimizer_state(self) -> Iterable[torch.Tensor]:
        return ()

    def weights(self) -> Iterable[torch.Tensor]:
        return ()

    def host_memory(self, num_bytes: int, *, is_pinned: bool) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def release_gradients(self) -> None:
        self.releases += 1


@pytest.mark.parametrize("name", ["gradients", "cpu_adam", "optimizer_state", "weights"])
def test_gradients_are_released_before_an_engine_takes_memory(name: str) -> None:
    """Once when the trainer is there and the engine is not, and at the beginning of every generation; training releases nothing. An error
    in a phase passes through.
    """
    strategy, handles = load_plugins().build_offload(name, {}), Handles()
    strategy.attach(handles)
    assert handles.releases == 1
    for expected in (2, 3):
        with strategy.generating():
            assert handles.releases == expected
        with strategy.training():
            assert handles.releases == expected
    with pytest.raises(ZeroDivisionError), strategy.generating():
        raise ZeroDivisionError


def test_the_optimizer_is_built_as_specified() -> None:
    """The spec comes back as it went in, and the strategy needs no GPU."""
    config, registry = compose_job(["offload=gradients"])
    registry.check_hardware(config, on_gpu=False)
    spec = OptimizerSpec({"lr": 1.0})
    assert registry.build_offload("gradients", config.offload.options).configure_optimizer(spec) is spec
