"""``gspo`` against its formula, in float64."""

from __future__ import annotations

import numpy as np
import torch

from rlbatch_plugins.loss_gspo import gspo
from tests.plugins.loss_cases import packed


def test_loss_and_gradient_follow_the_formula() -> None:
    """Equation 5 for rows of different lengths, one of them clipped, one without sampled tokens; the gradient by finite differences."""
    random = np.random.default_rng(0)
    mask = [[1, 1, 1, 0], [0, 1, 1, 1], [0, 0, 0, 0], [1, 0, 0, 0]]
    new, old = random.normal(-1, 0.2, (4, 4)), random.normal(-1, 0.2, (4, 4))
    new[3, 0], old[3, 0] = -0.5, -2.0
    advantages = np.array([[0.7], [-1.2], [3.0], [2.0]]) * np.ones((4, 4))

    def expected(logprobs: np.ndarray) -> float:
        total = 0.0
        for row, keep in enumerate(np.array(mask, dtype=bool)):
            if keep.any():
                ratio = np.exp((logprobs - old)[row, keep].mean())
                advantage = advantages[row, 0]
                total += max(-advantage * ratio, -advantage * np.clip(ratio, 0.8, 1.2)) * keep.sum()
        return total

    leaf, inputs = packed(new.tolist(), old.tolist(), advantages.tolist(), mask)
    outputs = gspo(inputs)
    loss = outputs.losses.where(inputs.sequences.sampled, 0.0).sum()
    loss.backward()
    assert abs(float(loss.detach()) - expected(new)) < 1e-12
    assert outputs.clipped.view(4, 4)[3, 0] == 1
    steps = np.eye(16).reshape(16, 4, 4) * 1e-6
    numeric = [(expected(new + step) - expected(new - step)) / 2e-6 for step in steps]
    assert leaf.grad is not None
    torch.testing.assert_close(leaf.grad, torch.tensor(numeric), atol=1e-8, rtol=1e-6)
