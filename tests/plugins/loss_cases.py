"""Packs as policy losses get them: rows of ragged tables, one after the other."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rlbatch.api import PolicyLossInputs, Sequences


def one_sequence(values: torch.Tensor) -> Sequences:
    """All tokens are one response."""
    sampled = torch.ones_like(values, dtype=torch.bool)
    return Sequences(torch.zeros(len(values), dtype=torch.int64), sampled, torch.tensor([float(len(values))]), torch.tensor([False]))


def packed(
    logprobs: Sequence[Sequence[float]],
    old_logprobs: Sequence[Sequence[float]],
    advantages: Sequence[Sequence[float]],
    mask: Sequence[Sequence[float]],
    eps_clip: float = 0.2,
    eps_clip_high: float = 0.2,
) -> tuple[torch.Tensor, PolicyLossInputs]:
    """The leaf with the log-probs of a pack, [rows x width] float64, and the inputs."""
    keep = torch.tensor(mask, dtype=torch.bool)
    leaf = torch.tensor(logprobs, dtype=torch.float64).flatten().requires_grad_()

    def flat(values: Sequence[Sequence[float]]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64).where(keep, 0.0).flatten()

    rows, width = keep.shape
    sequences = Sequences(
        torch.arange(rows).repeat_interleave(width), keep.flatten(), keep.sum(1).float(), torch.zeros(rows, dtype=torch.bool)
    )
    old = flat(old_logprobs)
    inputs = PolicyLossInputs(leaf.where(keep.flatten(), 0.0), old, old.clone(), flat(advantages), eps_clip, eps_clip_high, sequences)
    return leaf, inputs
