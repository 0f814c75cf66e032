"""Adam partly on the host, with Megatron's optimizer as ``rlbatch.megatron.patches`` corrects it.

Here a GPU is feigned: its tensors say that they are on one, its streams do nothing. On a real one: ``tests/gpu/offload.py``.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

import rlbatch.megatron  # noqa: F401  corrects Megatron-core

SHAPES = ((8, 16), (64,), (16, 8), (32,), (4, 4))


class OnGpu(Tensor):
    """A tensor of the host that says otherwise."""

    is_cuda = True


class Stream:
    """A stream on which everything is done at once."""

    def record_event(self) -> Stream:
        """Itself, as an event."""
        return self

    def wait_stream(self, other: Any) -> None:
        """Nothing to wait for."""

    def wait(self, stream: Any) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the optimizer asks of CUDA."""
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())


def hybrid(values: list[Tensor], fraction: float, dtype: torch.dtype = torch.bfloat16) -> Any:
    """An optimizer of parameters that begin with these values."""
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

    params = [value.to(dtype, copy=True).as_subclass(OnGpu) for value in values]
    groups = [{"params": params[:2], "weight_decay": 0.1}, {"params": params[2:], "weight_decay": 0.0}]
    return HybridDeviceOptimizer(
        groups,
        offload_fraction=fraction,
        cpu_optimizer_cls=torch.optim.AdamW,
        gpu_optimizer_cls=torch.optim.AdamW,
        param_update_in_fp32=True,
        pin_cpu_grads=False,
        lr=0.01,
    )


def stepped(optimizer: Any, steps: range) -> Any:
    """After these steps, each with gradients of its own."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for step in steps:
        for number, param in enumerate(params):
            draw = torch.Generator().manual_seed(100 * step + number)
            param.grad = torch.randn(param.shape, generator=draw).to(param.dtype).as_subclass(OnGpu)
        optimizer.step()
    return optimizer


def weights(optimizer: Any) -> list[Tensor]:
    """Of the model, and fp32 ones of the optimizer, in the order of the parameters."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    mains = {**optimizer.gpu_params_map_cpu_copy, **optimizer.param_to_fp32_param}
    return [each.detach().as_subclass(Tensor) for param in params for each in (param, mains.get(param, param))]


VALUES = [torch.randn(shape, generator=torch.Generator().manual_seed(number)) for number, shape in enumerate(SHAPES)]


@pytest.mark.parametrize("fraction", [0.3, 1.0])
def test_it_updates_as_adam_alone(fraction: float) -> None:
    """Main weights are AdamW's in fp32 of the bf16 values that it began with, the model's are these rounded."""
    mains = [value.bfloat16().float().requires_grad_() for value in VALUES]
    alone = torch.optim.AdamW([{"params": mains[:2], "weight_decay": 0.1}, {"params": mains[2:], "weight_decay": 0.0}], lr=0.01)
    optimizer = hybrid(VALUES, fraction)
    for step in range(3):
        for number, main in enumerate(mains):
            main.grad = torch.randn(main.shape, generator=torch.Generator().manual_seed(100 * step + number)).bfloat16().float()
        alone.step()
    found = weights(stepped(optimizer, range(3)))
    hosted = sum(param.numel() for param in optimizer.gpu_params_map_cpu_copy)
    assert hosted >= fraction * sum(value.numel() for value in VALUES)
    assert (hosted == sum(value.numel() for value in VALUES)) == (fraction == 1)
    for main, (rounded, own) in zip(mains, zip(found[::2], found[1::2], strict=True), strict=True):
        torch.testing.assert_close(own, main.detach(), rtol=1e-6, atol=1e-7)
        assert torch.equal(rounded, own.bfloat16())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("fraction", [0.3, 1.0])
def test_it_goes_on_from_a_checkpoint_in_the_memory_that_it_has(fraction: float, dtype: torch.dtype) -> None:
    """The next step is bitwise that of an optimizer that went on; the host's weights and gradients are where they were."""
    went_on = stepped(hybrid(VALUES, fraction, dtype), range(3))
    state = tree_map(lambda value: value.clone() if isinstance(value, Tensor) else value, went_on.state_dict())
    resumed = stepped(hybrid([torch.zeros_like(value) for value in VALUES], fraction, dtype), range(1))
    before = sorted(each.data_ptr() for each in (*resumed.cpu_copys_map_gpu_param, *resumed.cpu_copy_map_grad.values()))
    for ours, theirs in zip(weights(resumed)[::2], weights(went_on)[::2], strict=True):  # as a checkpoint has them
        ours.copy_(theirs)
    resumed.load_state_dict(state)
    for ours, theirs in zip(weights(stepped(resumed, range(3, 5))), weights(stepped(went_on, range(3, 5))), strict=True):
        assert torch.equal(ours, theirs)
    assert sorted(each.data_ptr() for each in (*resumed.cpu_copys_map_gpu_param, *resumed.cpu_copy_map_grad.values())) == before


def test_weights_that_were_set_are_the_optimizers() -> None:
    """After the model was filled, the optimizer's copies on both sides are asked for the values."""
    optimizer = hybrid(VALUES, 0.3)
    for param in (param for group in optimizer.param_groups for param in group["params"]):
        param.data.add_(1)
    optimizer.update_fp32_param_by_new_param()
    for rounded, own in zip(weights(optimizer)[::2], weights(optimizer)[1::2], strict=True):
        assert torch.equal(rounded.float(), own)
