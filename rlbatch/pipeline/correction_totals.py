"""The parts of a correction (``correction.*``) that need more than one pack. All else is in the loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from rlbatch.algorithms.aggregate import denominator
from rlbatch.algorithms.correction import correct, mismatch, mismatch_sums
from rlbatch.algorithms.objective import Objective
from rlbatch.api import Microbatch
from rlbatch.config.schema import CorrectionConfig
from rlbatch.megatron import parallel


def with_kept_ratio(objective: Objective, microbatches: Sequence[Microbatch]) -> Objective:
    """The objective of an update. With ``correction.denominator=kept`` it looks at all packs of the update and is a collective.

    Args:
        objective: Objective of the job.
        microbatches: This rank's microbatches of the update, with old log-probs and advantages where the correction needs them.
    """
    correction, aggregation = objective.correction, objective.algorithm.loss_aggregation
    if correction.denominator != "kept":
        return objective
    masks = [(m, (m.loss_mask, correct(m, correction).kept)) for m in microbatches]
    pairs = [[denominator(mask, m.cu_seqlens, aggregation) for mask in both] for m, both in masks]
    totals = torch.tensor(pairs, dtype=torch.float64).view(-1, 2).sum(0)
    dist.all_reduce(totals, group=parallel.dp_group())
    before, after = totals.tolist()
    return replace(objective, kept_ratio=before / after if after else 0.0)


def measured(microbatches: Sequence[Microbatch], correction: CorrectionConfig) -> dict[str, float]:
    """The ``mismatch/`` metrics of a step, over the packs of all ranks; a collective.

    Args:
        microbatches: This rank's microbatches, each sample in one of them, with old log-probs and advantages.
        correction: Options ``correction.*``.
    """
    sums, largest = zip(*(mismatch_sums(microbatch, correction) for microbatch in microbatches), strict=True)
    total, most = torch.stack(sums).sum(0), torch.stack(largest).max()
    dist.all_reduce(total, group=parallel.dp_group())
    dist.all_reduce(most, dist.ReduceOp.MAX, group=parallel.dp_group())
    return mismatch(total, float(most))
