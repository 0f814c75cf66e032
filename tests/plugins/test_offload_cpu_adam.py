"""``offload=cpu_adam``: what it asks of the optimizer. That it computes the same is checked on a GPU (``tests/gpu/offload.py``)."""

from __future__ import annotations

import pytest

from rlbatch.api import ConfigError, OptimizerSpec
from rlbatch.registry import compose_job, load_plugins


@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_megatrons_hybrid_optimizer_is_asked_for(fraction: float) -> None:
    """The fraction goes to the host with overlapped copies, main weights are the optimizer's; the rest of the spec stays. Memory of
    gradients is page-locked unless that is declined.
    """
    strategy = load_plugins().build_offload("cpu_adam", {"fraction": fraction, "pin_memory": fraction < 1})
    spec = strategy.configure_optimizer(OptimizerSpec({"bf16": True, "lr": 0.5}))
    assert spec.arguments == {
        "bf16": True,
        "lr": 0.5,
        "optimizer_cpu_offload": True,
        "optimizer_offload_fraction": fraction,
        "overlap_cpu_optimizer_d2h_h2d": True,
        "pin_cpu_grads": fraction < 1,
        "use_precision_aware_optimizer": True,
    }


def test_fp32_training_is_refused() -> None:
    """Megatron builds its hybrid optimizer for bf16 parameters only."""
    with pytest.raises(ConfigError, match=r"offload=cpu_adam: needs train\.precision=bf16, is fp32"):
        load_plugins().build_offload("cpu_adam", {}).configure_optimizer(OptimizerSpec({"bf16": False}))


@pytest.mark.parametrize("fraction", [0.0, -0.5, 1.5])
def test_fractions_outside_are_refused(fraction: float) -> None:
    """Nothing to offload, or more than all, is an error with the value."""
    with pytest.raises(ConfigError, match=r"offload\.options\.fraction=.*: must be (greater than 0|1 or less)\. Use e\.g\. 1\.0\."):
        compose_job(["offload=cpu_adam", f"offload.options.fraction={fraction}"])


def test_without_gpus_it_is_refused() -> None:
    """Megatron's hybrid optimizer needs CUDA: the job is refused before it starts."""
    config, registry = compose_job(["offload=cpu_adam"])
    with pytest.raises(ConfigError, match="offload=cpu_adam: needs GPUs"):
        registry.check_hardware(config, on_gpu=False)
    registry.check_hardware(config, on_gpu=True)
