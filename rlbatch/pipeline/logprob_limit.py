"""The limit ``rollout.max_logprob_diff``: a given number, or one derived from the effect of rounding on this model's log-probs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from rlbatch.api import Microbatch
from rlbatch.config.schema import Config
from rlbatch.megatron import parallel
from rlbatch.megatron.trainer import Trainer

FACTOR = 10.0
"""Ratio of the limit to the measured effect: engines round at more places than once a weight, and policies change as they learn."""
LEAST = 2e-6
"""Smallest limit, nats: one place of fp32 at log-probs around -16."""
DIGITS = {"fp32": 23, "bf16": 7, "fp8": 4}
"""Binary digits after the point in the coarser side's number format; for fp8 one more than it has, as weights are rounded once."""


@dataclass
class LogprobLimit:
    """The limit of one attempt of a run.

    Attributes:
        value: Largest accepted mean difference of log-probs, nats; None if there is no limit, or it is not measured yet.
    """

    value: float | None = None

    def measure(self, trainer: Trainer, config: Config, microbatches: Sequence[Microbatch], *, quantises: bool) -> None:
        """Sets ``value``, if it is not set; with ``auto`` from a measurement of two forward passes, which is a collective.

        The limit is then ``FACTOR`` times the mean difference of the samples' log-probs after about every second weight is changed in its
        last digit.
        """
        given = config.rollout.max_logprob_diff
        if given != "auto":
            self.value = given
        elif self.value is None:
            self.value = max(FACTOR * _by_rounding(trainer, config, microbatches, quantises=quantises), LEAST)


def _by_rounding(trainer: Trainer, config: Config, microbatches: Sequence[Microbatch], *, quantises: bool) -> float:
    """Mean difference of log-probs that rounding makes, nats."""
    # Where the trainer records its routes, engines have their own.
    packs = [replace(each, routes=None) if config.algorithm.routing_replay == "recorded" else each for each in microbatches]
    before = trainer.logprobs(packs)
    with trainer.rounded(DIGITS["fp8" if quantises else config.train.precision]):
        after = trainer.logprobs(packs)
    return _mean_difference([(one, two, pack.loss_mask) for one, two, pack in zip(before, after, packs, strict=True)])


def _mean_difference(values: Sequence[tuple[Tensor, Tensor, Tensor]]) -> float:
    """Mean absolute difference of two [T] tensors, weighted by a third, over all data-parallel ranks; a collective."""
    sums = torch.zeros(2, dtype=torch.float64)
    for one, other, weights in values:
        sums += torch.stack([((one - other).abs() * weights).sum(), weights.sum()]).double()
    dist.all_reduce(sums, group=parallel.dp_group())
    return float(sums[0] / sums[1].clamp(min=1.0))
