from __future__ import annotations

import numpy as np
import torch

from rlbatch.api import PolicyLossInputs, PolicyLossOutputs, Sequences
from rlbatch_plugins.loss_clip import ClipOptions, build_clip

OLD = [-1.0, -0.5, -2.0, -0.3, -0.7, -1.5, -0.2, -3.0, -0.1, -1.1]
NEW = [-0.6, -0.6, -1.9, -0.3, -1.0, -1.0, -0.15, -1.0, -0.4, -3.1]
ADVANTAGES = [1.0, 1.0, 1.0, 1.0, -0.8, -0.8, -0.8, -1.3, -1.3, -1.3]


def one_sequence(values: torch.Tensor) -> Sequences:
    """All tokens are one response."""
    sampled = torch.ones_like(values, dtype=torch.bool)
    return Sequences(torch.zeros(len(values), dtype=torch.int64), sampled, torch.tensor([float(len(values))]), torch.tensor([False]))


def loss(logprobs: torch.Tensor, old: list[float], advantages: list[float], low: float = 0.2, high: float = 0.2) -> PolicyLossOutputs:
    before = torch.tensor(old)
    return build_clip(ClipOptions())(
        PolicyLossInputs(logprobs, before, torch.full_like(before, 7.0), torch.tensor(advantages), low, high, one_sequence(logprobs))
    )


def test_clipped_means_no_gradient() -> None:
    """``clipped`` is 1 exactly where the gradient is 0; elsewhere the gradient is -A r, also inside the range where both branches tie."""
    logprobs = torch.tensor(NEW, requires_grad=True)
    outputs = loss(logprobs, OLD, ADVANTAGES)
    (gradient,) = torch.autograd.grad(outputs.losses.sum(), logprobs)
    assert torch.equal(outputs.clipped == 1, gradient == 0)
    assert outputs.clipped.tolist() == [1, 0, 0, 0, 1, 0, 0, 0, 1, 1]
    kept = outputs.clipped == 0
    expected = -torch.tensor(ADVANTAGES) * (logprobs - torch.tensor(OLD)).exp()
    torch.testing.assert_close(gradient[kept], expected[kept].detach(), rtol=0, atol=1e-6)


def test_equal_logprobs_give_ratio_one_exactly() -> None:
    """Before the first update the loss is exactly -A, its gradient exactly -A, and nothing is clipped, even with empty clip ranges."""
    logprobs = torch.tensor(OLD, requires_grad=True)
    outputs = loss(logprobs, OLD, ADVANTAGES, low=0.0, high=0.0)
    (gradient,) = torch.autograd.grad(outputs.losses.sum(), logprobs)
    assert torch.equal(outputs.losses, -torch.tensor(ADVANTAGES))
    assert torch.equal(gradient, -torch.tensor(ADVANTAGES))
    assert not outputs.clipped.any()


def test_an_extreme_ratio_stays_finite() -> None:
    """A log ratio of +-200 gives finite losses and gradients: the ratio is bounded by exp(20)."""
    logprobs = torch.tensor([0.0, 0.0, -200.0, -200.0], requires_grad=True)
    outputs = loss(logprobs, [-200.0, -200.0, 0.0, 0.0], [1.0, -1.0, 1.0, -1.0])
    (gradient,) = torch.autograd.grad(outputs.losses.sum(), logprobs)
    assert gradient.isfinite().all()
    np.testing.assert_allclose(outputs.losses.detach().numpy(), [-1.2, np.exp(20.0), -np.exp(-20.0), 0.8], rtol=1e-6)
