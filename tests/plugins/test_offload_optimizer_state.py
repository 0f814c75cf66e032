"""``offload=optimizer_state`` where nothing is on a GPU. What it does on one is checked there (``tests/gpu/offload.py``)."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from rlbatch.api import OptimizerSpec
from rlbatch.registry import load_plugins


class Handles:
    """Two tensors that are on the host."""

    def __init__(self) -> None:
        self.state = [torch.arange(4.0), torch.ones(2)]

    def optimizer_state(self) -> Iterable[torch.Tensor]:
        return self.state

    def release_gradients(self) -> None:
        """It has none."""


def test_host_tensors_stay_where_they_are() -> None:
    """Only GPU tensors move; the optimizer is built as without the strategy, and an error in the phase passes through."""
    strategy, handles = load_plugins().build_offload("optimizer_state", {"pin_memory": False}), Handles()
    spec = OptimizerSpec({"lr": 1.0})
    assert strategy.configure_optimizer(spec) is spec
    strategy.attach(handles)
    storages = [tensor.data_ptr() for tensor in handles.state]
    try:
        with strategy.generating(), strategy.training():
            assert [tensor.data_ptr() for tensor in handles.state] == storages
            raise KeyError("engine")
    except KeyError:
        pass
    assert torch.equal(handles.state[0], torch.arange(4.0))
