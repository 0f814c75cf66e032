"""Divides a step's samples into optimizer updates: which samples, on which data-parallel rank, in which packs.

Every rank has the lengths of all samples, so every rank computes the same division; nothing is communicated.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from rlbatch.algorithms.aggregate import denominator
from rlbatch.config.schema import Config
from rlbatch.pipeline.exchange import Batch
from rlbatch.pipeline.packing import (
    Pack,
    assign_to_ranks,
    build_microbatches,
    microbatch_multiple,
    pack,
    pad_with_dummies,
    sequence_multiple,
    split_by_sample,
    spread_over_packs,
    with_advantages,
)


@dataclass(frozen=True)
class Update:
    """One optimizer update.

    Attributes:
        samples: This rank's samples, as indices into the batch.
        packs: Of these samples; as many on every data-parallel rank, dummies included.
        denominator: Of the loss, over the samples of all ranks.
        tokens: Sampled tokens, of all ranks.
        new_tokens: Those of them that the step's first policy sampled.
    """

    samples: tuple[int, ...]
    packs: tuple[Pack, ...]
    denominator: float
    tokens: int
    new_tokens: int

    def with_advantages(self, advantages: Sequence[Tensor]) -> Update:
        """The update with the advantages (N tensors, of the whole batch) in its packs."""
        return replace(self, packs=tuple(with_advantages(self.packs, [advantages[i] for i in self.samples])))

    def with_logprobs(self, name: str, logprobs: Sequence[Tensor]) -> Update:
        """The update with log-probs ([L_i] for each of the N samples of the batch) in its packs, as ``Microbatch.<name>``."""
        filled = spread_over_packs(self.packs, [logprobs[i] for i in self.samples])
        changes: list[dict[str, Any]] = [{name: values} for values in filled]
        packs = [replace(pack, microbatch=replace(pack.microbatch, **new)) for pack, new in zip(self.packs, changes, strict=True)]
        return replace(self, packs=tuple(packs))

    def sample_at(self, pack: int, position: int) -> tuple[int, int] | None:
        """Finds whose token it is, by index in the batch, and the token's place in the sample; None: a dummy's."""
        item = self.packs[pack]
        starts = item.microbatch.cu_seqlens.tolist()
        sequence = bisect_right(starts, position) - 1
        if sequence >= len(item.sample_indices):
            return None
        return self.samples[item.sample_indices[sequence]], position - starts[sequence]

    def by_sample(self, values: Sequence[Tensor]) -> dict[int, Tensor]:
        """[T] for each pack -> [L] for each sample, by its index in the batch."""
        return dict(zip(self.samples, split_by_sample(self.packs, values), strict=True))


def shuffled_groups(seed: int, step: int, epoch: int, groups: int) -> list[int]:
    """Order in which an epoch after the first takes the step's groups: depends on nothing but this."""
    order = list(range(groups))
    random.Random(f"group order {seed} {step} {epoch}").shuffle(order)
    return order


def plan_updates(batch: Batch, config: Config, dp_rank: int, dp_size: int, order: Sequence[int] | None = None) -> list[Update]:
    """Divides the step's groups evenly over ``train.updates_per_step`` updates, or over as many as there are groups.

    Args:
        batch: All samples.
        config: Packing, layout and aggregation.
        dp_rank: This rank's share.
        dp_size: Shares.
        order: Of the groups, by their position in the step; None: prompt order.

    Returns:
        The updates, each with this rank's packs.
    """
    groups = batch.num_groups
    updates = min(config.train.updates_per_step, groups)
    place = torch.arange(groups) if order is None else torch.tensor(order).argsort()
    number = place[batch.group_ids] * updates // max(groups, 1)
    return [_plan(batch, torch.nonzero(number == update).flatten().tolist(), config, dp_rank, dp_size) for update in range(updates)]


def _plan(batch: Batch, samples: list[int], config: Config, dp_rank: int, dp_size: int) -> Update:
    layout = config.layout
    multiple = sequence_multiple(layout.tp_size, layout.cp_size)
    max_tokens = config.train.max_tokens_per_gpu * layout.cp_size
    lengths = [batch.lengths[i] for i in samples]
    shares = assign_to_ranks(lengths, dp_size)
    padded = [-(-length // multiple) * multiple for length in lengths]
    most_packs = max(1, *(len(pack([padded[i] for i in share], max_tokens)) for share in shares))  # all its groups may be left out
    most_packs = -(-most_packs // microbatch_multiple(layout)) * microbatch_multiple(layout)
    mine = [samples[i] for i in shares[dp_rank]]
    packs = build_microbatches(
        [batch.token_ids[i] for i in mine],
        [batch.loss_mask[i] for i in mine],
        [batch.rollout_logprobs[i] for i in mine],
        max_tokens=max_tokens,
        pad_multiple=multiple,
        truncated=[bool(batch.truncated[i]) for i in mine],
        kept=[batch.kept[i] for i in mine] if batch.kept else (),
        lags=[batch.lags[i] for i in mine],
    )
    masks, lags = (torch.cat([values[i] for i in samples]) for values in (batch.loss_mask, batch.lags))
    bounds = pad(torch.tensor(lengths).cumsum(0), (1, 0))
    constant = config.algorithm.loss_norm_constant or config.rollout.max_response_tokens
    total = denominator(masks, bounds, config.algorithm.loss_aggregation, constant) or 1.0  # all are left out: a loss of 0
    return Update(tuple(mine), tuple(pad_with_dummies(packs, most_packs, multiple)), total, int(masks.sum()), int(masks[lags == 0].sum()))
