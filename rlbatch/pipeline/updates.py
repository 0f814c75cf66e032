"""Divides a step's samples into optimizer updates: which samples, on which data-parallel rank, in which packs.

Every rank has the lengths of all samples, so every rank computes the same division, and knows whose tokens go where.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rlbatch.algorithms.advantages import Advantages
from rlbatch.algorithms.aggregate import denominator_of
from rlbatch.config.schema import Config
from rlbatch.pipeline.exchange import Batch, Deal, Row
from rlbatch.pipeline.packing import (
    Pack,
    assign_to_ranks,
    build_pack,
    pack,
    pad_with_dummies,
    sequence_multiple,
    split_by_sample,
    spread_over_packs,
    with_advantages,
)
from rlbatch.plan.layout import microbatch_count


@dataclass(frozen=True)
class Update:
    """One optimizer update.

    Attributes:
        shares: Samples of each data-parallel rank, as indices into the batch.
        samples: Samples of this rank, as indices into the batch.
        packs: Packs of this rank's samples. Every data-parallel rank has equally many, dummies included.
        denominator: Denominator of the loss, over the samples of all ranks.
        tokens: Number of sampled tokens, on all ranks.
    """

    shares: Sequence[Sequence[int]]
    samples: Sequence[int]
    packs: tuple[Pack, ...]
    denominator: float
    tokens: int

    def with_advantages(self, advantages: Advantages) -> Update:
        """The update with advantages, given for the whole batch, in its packs."""
        return replace(self, packs=tuple(with_advantages(self.packs, [advantages[i] for i in self.samples])))

    def with_logprobs(self, name: str, logprobs: Mapping[int, Tensor]) -> Update:
        """The update with log-probs ([L_i] for each of its samples, by index in the batch) in its packs, as ``Microbatch.<name>``."""
        return self.with_values(name, spread_over_packs(self.packs, [logprobs[i] for i in self.samples]))

    def with_values(self, name: str, values: Sequence[Tensor]) -> Update:
        """The update with values ([T] for each of its packs) as ``Microbatch.<name>``."""
        changes: list[dict[str, Any]] = [{name: of_pack} for of_pack in values]
        packs = [replace(pack, microbatch=replace(pack.microbatch, **new)) for pack, new in zip(self.packs, changes, strict=True)]
        return replace(self, packs=tuple(packs))

    def sample_at(self, pack: int, position: int) -> tuple[int, int] | None:
        """Index in the batch of the sample that has this token of a pack, and the token's place in the sample; None for a dummy."""
        item = self.packs[pack]
        starts = item.microbatch.cu_seqlens.tolist()
        sequence = bisect_right(starts, position) - 1
        if sequence >= len(item.sample_indices):
            return None
        return self.samples[item.sample_indices[sequence]], position - starts[sequence]

    def by_sample(self, values: Sequence[Tensor]) -> dict[int, Tensor]:
        """Cuts values ([T] for each pack) into [L_i] for each sample, by its index in the batch."""
        return dict(zip(self.samples, split_by_sample(self.packs, values), strict=True))


def shuffled_groups(seed: int, step: int, epoch: int, groups: int) -> list[int]:
    """Order in which an epoch after the first takes the step's groups; depends on these arguments alone."""
    order = list(range(groups))
    random.Random(f"group order {seed} {step} {epoch}").shuffle(order)
    return order


def plan_updates(batch: Batch, config: Config, dp_rank: int, dp_size: int, deal: Deal, order: Sequence[int] | None = None) -> list[Update]:
    """Divides the step's groups evenly over ``train.updates_per_step`` updates, or fewer if there are fewer groups; a collective.

    ``order`` has the groups' positions in the step, in the order in which updates take them (None: prompt order). ``deal`` is called once
    for each update. Each result has the packs of this rank.
    """
    groups = batch.num_groups
    updates = min(config.train.updates_per_step, groups)
    place = torch.arange(groups) if order is None else torch.tensor(order).argsort()
    number = place[batch.group_ids] * updates // max(groups, 1)
    return [_plan(batch, torch.nonzero(number == update).flatten().tolist(), config, dp_rank, dp_size, deal) for update in range(updates)]


def _plan(batch: Batch, samples: list[int], config: Config, dp_rank: int, dp_size: int, deal: Deal) -> Update:
    layout = config.layout
    multiple = sequence_multiple(layout.tp_size, layout.cp_size)
    max_tokens = config.train.pack_tokens * layout.cp_size
    shares = [[samples[i] for i in share] for share in assign_to_ranks([batch.lengths[i] for i in samples], dp_size)]
    padded = [[-(-batch.lengths[i] // multiple) * multiple for i in share] for share in shares]
    division = [pack(lengths, max_tokens) for lengths in padded]
    most_packs = microbatch_count(layout, max(1, *map(len, division)))  # all its groups may be left out
    rows, mine = deal(shares), shares[dp_rank]
    packs = [_pack(batch, rows, [mine[place] for place in places], places, multiple) for places in division[dp_rank]]
    constant = config.algorithm.loss_norm_constant or config.rollout.max_response_tokens
    sampled = batch.response_lengths[samples]
    return Update(
        shares,
        mine,
        tuple(pad_with_dummies(packs, most_packs, multiple)),
        denominator=denominator_of(sampled, config.algorithm.loss_aggregation, constant) or 1.0,  # all are left out: a loss of 0
        tokens=int(sampled.sum()),
    )


def _pack(batch: Batch, rows: Mapping[int, Row], samples: Sequence[int], places: Sequence[int], multiple: int) -> Pack:
    """Builds one pack from samples of the batch, which are at ``places`` of this rank's share."""
    mine = [rows[i] for i in samples]
    return build_pack(
        places,
        [row.token_ids for row in mine],
        [row.ages >= 0 for row in mine],
        [row.logprobs for row in mine],
        pad_multiple=multiple,
        truncated=batch.truncated[samples].tolist(),
        kept=[row.kept for row in mine if row.kept],
        lags=[row.ages for row in mine],
        routes=[row.routes for row in mine if row.routes],
    )
