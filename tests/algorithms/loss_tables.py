"""Packs from tables of rows, as losses and estimators get them, and what an update makes of their answers; float64 where the case is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from rlbatch.algorithms.advantages import advantage_inputs
from rlbatch.algorithms.aggregate import denominator, loss_weights
from rlbatch.api import AdvantageInputs, PolicyLoss, PolicyLossInputs, PolicyLossOutputs, Sequences
from rlbatch.config.schema import AlgorithmConfig
from rlbatch.registry import Registry, load_plugins

Table = Sequence[Sequence[float]]


@cache
def registry() -> Registry:
    """The built-in plugins."""
    return load_plugins()


def loss_named(name: str, **options: Any) -> PolicyLoss:
    """A policy loss with these options."""
    return registry().build_loss(AlgorithmConfig(loss=name, loss_options=options))


def advantages_named(name: str, inputs: AdvantageInputs, **options: Any) -> Tensor:
    """[T] advantages of an estimator with these options."""
    answer = registry().build_advantage(AlgorithmConfig(advantage=name, advantage_options=options))(inputs)
    return answer if len(answer) == int(inputs.lengths.sum()) else answer.repeat_interleave(inputs.lengths)


class Pack:
    """Rows of one width, one after the other."""

    def __init__(
        self, mask: Table, tables: Mapping[str, Table], eps: tuple[float, float] = (0.2, 0.2), dtype: torch.dtype = torch.float64
    ) -> None:
        """Takes ``logprobs`` and what else there is of ``old_logprobs``, ``rollout_logprobs`` (else the old ones), ``ref_logprobs`` and
        ``advantages``.
        """
        self.keep = torch.tensor(mask, dtype=torch.bool)
        rows, width = self.keep.shape
        self.leaf = torch.tensor(tables["logprobs"], dtype=dtype).flatten().requires_grad_()
        kept = self.keep.flatten()

        def flat(name: str, otherwise: str = "") -> Tensor:
            table = tables.get(name, tables.get(otherwise, torch.zeros(rows, width).tolist()))
            return torch.tensor(table, dtype=dtype).flatten().where(kept, 0.0)

        sequences = Sequences(
            torch.arange(rows).repeat_interleave(width), kept, self.keep.sum(1).float(), torch.zeros(rows, dtype=torch.bool)
        )
        self.inputs = PolicyLossInputs(
            self.leaf.where(kept, 0.0),
            flat("old_logprobs"),
            flat("rollout_logprobs", "old_logprobs"),
            flat("advantages"),
            *eps,
            sequences,
            flat("ref_logprobs"),
        )

    def aggregated(self, outputs: PolicyLossOutputs, aggregation: str, constant: float = 1.0) -> Tensor:
        """The update's loss."""
        rows, width = self.keep.shape
        mask = self.keep.flatten().to(outputs.losses.dtype)
        sequences = self.inputs.sequences
        weights = loss_weights(mask, sequences.ids, sequences.lengths.to(mask.dtype), aggregation)
        total = denominator(mask, torch.arange(rows + 1) * width, aggregation, constant)
        return (outputs.losses.where(self.keep.flatten(), 0.0) * weights).sum() / total

    def loss_and_gradient(self, policy_loss: PolicyLoss, aggregation: str, constant: float = 1.0) -> tuple[float, Tensor]:
        """The update's loss, and its gradient [rows, width]."""
        loss = self.aggregated(policy_loss(self.inputs), aggregation, constant)
        (gradient,) = torch.autograd.grad(loss, self.leaf, retain_graph=True)
        return float(loss.detach()), gradient.view(self.keep.shape)


def estimator_inputs(
    mask: Table, group_ids: Sequence[Any], rewards: Sequence[float], token_rewards: Table | None = None
) -> AdvantageInputs:
    """Of the rows that have a token; token rewards replace those on the last tokens."""
    keep = torch.tensor(mask, dtype=torch.bool)
    rows = keep.any(1)
    names = sorted(set(group_ids), reverse=True)
    ids = torch.tensor([names.index(name) for name in group_ids])[rows]
    inputs = advantage_inputs(torch.tensor(rewards, dtype=torch.float64)[rows], ids, keep.sum(1)[rows])
    if token_rewards is not None:
        inputs.token_rewards[:] = torch.tensor(token_rewards, dtype=torch.float64)[keep]
    return inputs
