"""``offload=cpu_adam``: what it asks of the optimizer. That it computes the same is checked on a GPU (``tests/gpu/offload.py``)."""

from __future__ import annotations

import pytest

from rlbatch.api import ConfigError, OptimizerSpec
from rlbatch.registry import compose_job, load_plugins


@pytest.mark.parametrize(("precision_is_bf16", "fraction"), [(True, 1.0), (False, 0.5)])
def test_megatrons_hybrid_optimizer_is_asked_for(precision_is_bf16: bool, fraction: float) -> None:
    """The fraction goes to the host with overlapped copies; bf16 parameters get their main weights in the optimizer; the rest stays."""
    strategy = load_plugins().build_offload("cpu_adam", {"fraction": fraction})
    spec = strategy.configure_optimizer(OptimizerSpec({"bf16": precision_is_bf16, "lr": 0.5}))
    assert spec.arguments == {
        "bf16": precision_is_bf16,
        "lr": 0.5,
        "optimizer_cpu_offload": True,
        "optimizer_offload_fraction": fraction,
        "overlap_cpu_optimizer_d2h_h2d": True,
        "use_precision_aware_optimizer": precision_is_bf16,
    }


@pytest.mark.parametrize("fraction", [0.0, -0.5, 1.5])
def test_fractions_outside_are_refused(fraction: float) -> None:
    """Nothing to offload, or more than all, is an error with the value."""
    with pytest.raises(ConfigError, match=r"offload\.options\.fraction=.*: must be above 0 and at most 1"):
        load_plugins().build_offload("cpu_adam", {"fraction": fraction})


@pytest.mark.parametrize("name", ["cpu_adam", "optimizer_state"])
def test_without_gpus_it_is_refused(name: str) -> None:
    """Megatron's hybrid optimizer needs CUDA: the job is refused before it starts."""
    config, registry = compose_job([f"offload={name}"])
    with pytest.raises(ConfigError, match=f"offload={name}: needs GPUs"):
        registry.check_hardware(config, on_gpu=False)
    registry.check_hardware(config, on_gpu=True)
