"""The correction of an update's packs (``correction.*``): local to a rank, but for the denominator of what is kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from rlbatch.algorithms.aggregate import denominator
from rlbatch.algorithms.correction import correct, is_on, mismatch, mismatch_sums, with_denominator_of_kept
from rlbatch.api import Microbatch
from rlbatch.config.schema import CorrectionConfig
from rlbatch.megatron import parallel


def corrected(microbatches: Sequence[Microbatch], correction: CorrectionConfig, aggregation: str) -> list[Microbatch]:
    """The packs with what their policy loss is multiplied with; as they are if nothing is corrected.

    Args:
        microbatches: This rank's of one update, with old log-probs and advantages.
        correction: ``correction.*``.
        aggregation: ``algorithm.loss_aggregation``.
    """
    if not is_on(correction):
        return list(microbatches)
    done = [correct(microbatch, correction) for microbatch in microbatches]
    weights = [each.weights for each in done]
    if correction.denominator == "kept":
        masks = zip(microbatches, done, strict=True)
        pairs = [[denominator(mask, m.cu_seqlens, aggregation) for mask in (m.loss_mask, each.kept)] for m, each in masks]
        totals = torch.tensor(pairs, dtype=torch.float64).view(-1, 2).sum(0)
        dist.all_reduce(totals, group=parallel.dp_group())
        before, after = totals.tolist()
        ratio = before / after if after else 0.0
        weights = [
            with_denominator_of_kept(*each, microbatch, aggregation, ratio) for microbatch, each in zip(microbatches, done, strict=True)
        ]
    return [replace(microbatch, correction=values.float()) for microbatch, values in zip(microbatches, weights, strict=True)]


def measured(microbatches: Sequence[Microbatch], correction: CorrectionConfig) -> dict[str, float]:
    """``mismatch/`` of a step, over the packs of all ranks; a collective.

    Args:
        microbatches: This rank's, each sample in one of them; as for ``corrected``.
        correction: ``correction.*``.
    """
    sums, largest = zip(*(mismatch_sums(microbatch, correction) for microbatch in microbatches), strict=True)
    total, most = torch.stack(sums).sum(0), torch.stack(largest).max()
    dist.all_reduce(total, group=parallel.dp_group())
    dist.all_reduce(most, dist.ReduceOp.MAX, group=parallel.dp_group())
    return mismatch(total, float(most))
