"""Exchanges samples between ranks: every rank gets the numbers of all samples, and the tokens of those that it trains on in an update.

What is sent are flat tensors, never pickles.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, chain
from operator import itemgetter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from rlbatch.api import KeptTokens, Prompt, Routes, Sample, SampleGroup, Span
from rlbatch.collectives import all_gather_ragged, all_to_all_ragged

NO_LIMIT = torch.iinfo(torch.int32).max
ROUND_TOKENS = 2**18
"""Tokens that each rank sends at once, on average. Up to four times as many are held at a time, 12 bytes each."""
Shares = Sequence[Sequence[int]]
"""Indices in the batch of the samples that each data-parallel rank trains on."""


class Row(NamedTuple):
    """The tensors of a sample that are used in training.

    Attributes:
        columns: [3 or more, L] int32 as in ``Batch.columns``. The rest are views made on demand: a rank has ten thousands of samples.
        kept: Vocabularies that tokens were chosen from; None: the whole vocabulary.
        routes: Experts of the tokens in this rank's layers; None: the routers choose.
    """

    columns: Tensor
    kept: KeptTokens | None = None
    routes: Routes | None = None

    @property
    def token_ids(self) -> Tensor:
        """[L] int32 token ids, prompt included."""
        return self.columns[0]

    @property
    def logprobs(self) -> Tensor:
        """[L] float32 log-probs of the engine, nats."""
        return self.columns[1].view(torch.float32)

    @property
    def ages(self) -> Tensor:
        """[L] int32, number of policy versions by which each token is older than the step's first policy; -1: the token is masked."""
        return self.columns[2]


Deal = Callable[[Shares], Mapping[int, Row]]
"""A collective that gives each data-parallel rank the rows of its share."""


@dataclass(frozen=True)
class Batch:
    """All N samples of the step, in prompt order then sample order. Every rank has their numbers; each has the tokens of those it sampled.

    Attributes:
        lengths: Number of tokens of each of the N samples, prompt included.
        rewards: [N] float64.
        group_ids: [N] int64, position of the sample's prompt in the step.
        truncated: [N] bool, whether the response was cut at the length limit.
        lags: [N] int64, number of policy versions by which the sample's oldest token is older than the step's first policy.
        sampled: [N] int64, number of sampled tokens.
        new: [N] int64, number of tokens that the step's first policy sampled.
        limits: [N] int32, greatest age of tokens that count; older ones are masked.
        own: Samples of this rank, by index.
        version: Version of the step's first policy; -1 if not known.
        with_kept: Whether tokens were chosen from a part of the vocabulary.
    """

    lengths: list[int]
    rewards: Tensor
    group_ids: Tensor
    truncated: Tensor
    lags: Tensor
    sampled: Tensor
    new: Tensor
    limits: Tensor
    own: Mapping[int, Sample]
    version: int = -1
    with_kept: bool = False

    @cached_property
    def response_lengths(self) -> Tensor:
        """[N] int64, number of sampled tokens of each sample that count."""
        return self.sampled.where(self.limits > 0, self.new_lengths)

    @cached_property
    def new_lengths(self) -> Tensor:
        """[N] int64, number of these tokens that the step's first policy sampled."""
        return self.new.where(self.limits >= 0, 0)

    @cached_property
    def most_lag(self) -> int:
        """Greatest age of the tokens that are not masked, policy versions."""
        lags: list[int] = torch.minimum(self.lags, self.limits).tolist()
        return max([0, *lags])

    @cached_property
    def num_groups(self) -> int:
        """Number of prompts in the step."""
        return int(self.group_ids[-1]) + 1 if len(self.group_ids) else 0

    def without_truncated(self) -> Batch:
        """The batch with truncated responses masked, so that they count for no loss, denominator or advantage."""
        return replace(self, limits=self.limits.masked_fill(self.truncated, -1))

    def without_old(self) -> Batch:
        """The batch with tokens of earlier policies masked. For losses, not for the rewards' statistics."""
        return replace(self, limits=self.limits.clamp(max=0))

    def name(self, index: int, prompts: Sequence[Prompt]) -> str:
        """Name of a sample in messages, e.g. ``prompt 17 sample 3``.

        Args:
            index: Index of the sample.
            prompts: Prompts of the step, in order.
        """
        position = self.group_ids[index]
        return f"prompt {prompts[int(position)].prompt_id} sample {index - int((self.group_ids < position).sum())}"

    def columns(self, indices: Sequence[int]) -> dict[int, Tensor]:
        """[C, L_i] int32 for each of these samples of this rank: token ids, bits of log-probs, ages and, with ``with_kept``, counts."""
        samples, lengths = [self.own[i] for i in indices], [self.lengths[i] for i in indices]
        values = torch.empty(3 + self.with_kept, sum(lengths), dtype=torch.int32)
        values[0] = _flat([sample.token_ids for sample in samples])
        values[1] = _flat([sample.rollout_logprobs for sample in samples]).float().view(torch.int32)
        values[2] = _ages(samples, self.version)
        values[2].masked_fill_(values[2] > self.limits[list(indices)].repeat_interleave(torch.tensor(lengths, dtype=torch.int64)), -1)
        if self.with_kept:
            values[3] = _flat([sample.kept.counts for sample in samples if sample.kept])
        return dict(zip(indices, values.split(lengths, 1), strict=True))


def exchange(groups: Sequence[SampleGroup], positions: Sequence[int], version: int = -1, *, with_kept: bool = False) -> Batch:
    """Gives every rank the numbers of all ranks' samples; a collective.

    Args:
        groups: Scored groups of this rank.
        positions: Positions of their prompts in the step.
        version: Version of the step's first policy; -1 if not known, then no token is old.
        with_kept: Whether tokens were chosen from a part of the vocabulary.
    """
    mine = [
        (position, sample, reward)
        for position, group in zip(positions, groups, strict=True)
        for sample, reward in zip(group.samples, group.rewards, strict=True)
    ]
    samples = [sample for _, sample, _ in mine]
    ages = _ages(samples, version)
    bounds = torch.tensor([0, *accumulate(len(sample.token_ids) for sample in samples)])

    def count(which: Tensor) -> Tensor:
        return pad(which.cumsum(0, dtype=torch.int32), (1, 0))[bounds].diff()

    numbers = [
        [position, sample.sample_index, len(sample.token_ids), sample.finish_reason == "length", _lag(sample, version)]
        for position, sample, _ in mine
    ]
    told = torch.cat([torch.tensor(numbers, dtype=torch.int64).view(-1, 5), torch.stack([count(ages >= 0), count(ages == 0)], 1)], 1)
    parts = all_gather_ragged(told.flatten())
    rewards = torch.cat(all_gather_ragged(torch.tensor([reward for *_, reward in mine], dtype=torch.float64)))
    position, index, length, truncated, lags, sampled, new = torch.cat(parts).view(-1, 7).unbind(1)
    order = ((position << 32) + index).argsort()
    before = sum(len(part) for part in parts[: dist.get_rank()]) // 7
    places = order.argsort()[before : before + len(samples)].tolist()
    return Batch(
        lengths=length[order].tolist(),
        rewards=rewards[order],
        group_ids=position[order],
        truncated=truncated[order].bool(),
        lags=lags[order],
        sampled=sampled[order],
        new=new[order],
        limits=torch.full((len(order),), NO_LIMIT, dtype=torch.int32),
        own=dict(sorted(zip(places, samples, strict=True), key=itemgetter(0))),
        version=version,
        with_kept=with_kept,
    )


def deal(batch: Batch, shares: Shares, group: Any, sharing: Sequence[Any] = ()) -> dict[int, Row]:
    """Gives each data-parallel rank the rows of its share, ``ROUND_TOKENS`` at a time; a collective.

    Args:
        batch: Batch with the samples to give.
        shares: Samples for each rank of ``group``, none of them twice.
        group: Process group of data-parallel ranks.
        sharing: Process groups that together have all ranks of one share.
    """
    tokens = sum(batch.lengths[i] for i in chain(*shares))
    rounds = max(1, -(-tokens // (ROUND_TOKENS * dist.get_world_size())))
    rows: dict[int, Row] = {}
    for number in range(rounds):
        rows |= _deal(batch, [share[number::rounds] for share in shares], group, sharing)
    return rows


def _deal(batch: Batch, shares: Shares, group: Any, sharing: Sequence[Any]) -> dict[int, Row]:
    own = [i for i in chain(*shares) if i in batch.own]
    columns = dealt(batch.columns(own), shares, batch.lengths, 3 + batch.with_kept, group, sharing)
    kept: dict[int, KeptTokens] = {}
    if batch.with_kept:
        counts = {i: int(values[3].sum()) for i, values in columns.items()}
        ids = dealt({i: chosen.ids.int()[None] for i in own if (chosen := batch.own[i].kept)}, shares, counts, 1, group, sharing)
        kept = {i: KeptTokens(ids[i][0], values[3].long()) for i, values in columns.items()}
    return {i: Row(values, kept.get(i)) for i, values in columns.items()}


def deal_values(mine: Mapping[int, Tensor], shares: Shares, lengths: Sequence[int], group: Any) -> dict[int, Tensor]:
    """Gives each rank of a group one value for each token of its share; a collective.

    Args:
        mine: [L_i] float32 for each of this rank's samples, by index.
        shares: Samples for each rank of the group.
        lengths: L_i of all N samples.
        group: Process group whose ranks together have every sample once.
    """
    found = dealt({i: values.view(torch.int32)[None] for i, values in mine.items()}, shares, lengths, 1, group)
    return {i: values[0].view(torch.float32) for i, values in found.items()}


def all_gather_samples(mine: Mapping[int, Tensor], lengths: Sequence[int], group: Any) -> list[Tensor]:
    """Gathers one tensor for each sample, from the rank that has it; a collective.

    Args:
        mine: [L_i] float32 or float64 for each of this rank's samples, by index.
        lengths: L_i of all N samples.
        group: Process group whose ranks together have every sample once.

    Returns:
        N float64 tensors, in the order of samples.
    """
    owned = torch.cat(all_gather_ragged(torch.tensor(list(mine), dtype=torch.int64), group)).tolist()
    # A rank without samples has no dtype to go by: doubles hold every float32.
    values = torch.cat(all_gather_ragged(torch.cat([torch.empty(0, dtype=torch.float64), *(v.double() for v in mine.values())]), group))
    by_sample = dict(zip(owned, values.split([lengths[i] for i in owned]), strict=True))
    return [by_sample[i] for i in range(len(lengths))]


def lags_of(sample: Sample, version: int) -> Tensor:
    """[L] int64, number of policy versions between ``version`` and the one that sampled each token; 0 where one of them is not known."""
    lags = torch.zeros(len(sample.token_ids), dtype=torch.int64)
    for span in _spans(sample):
        if min(version, span.policy_version) >= 0:
            lags[span.start : span.end] = version - span.policy_version
    return lags


def _spans(sample: Sample) -> Sequence[Span]:
    return sample.spans or [Span(sample.policy_version, len(sample.prompt.token_ids), len(sample.token_ids))]


def _lag(sample: Sample, version: int) -> int:
    """Number of policy versions by which the sample's oldest token is older than ``version``."""
    return max(version - span.policy_version if min(version, span.policy_version) >= 0 else 0 for span in _spans(sample))


def _ages(samples: Sequence[Sample], version: int) -> Tensor:
    """[T] int32 ages of all tokens of these samples, as in ``Row.ages``."""
    ages = (_flat([sample.loss_mask for sample in samples]) > 0).int() - 1
    for sample, own in zip(samples, ages.split([len(sample.token_ids) for sample in samples]), strict=True):
        if _lag(sample, version):
            own += lags_of(sample, version).int().where(own == 0, 0)
    return ages


def _flat(values: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(values)) if values else torch.empty(0)


def dealt(
    mine: Mapping[int, Tensor],
    shares: Shares,
    lengths: Mapping[int, int] | Sequence[int],
    columns: int,
    group: Any,
    sharing: Sequence[Any] = (),
) -> dict[int, Tensor]:
    """[C, L_i] int32 for each sample of this rank's share, sent by the ranks that have it; a collective of ``group`` and ``sharing``."""
    messages = all_to_all_ragged([message({i: mine[i] for i in share if i in mine}) for share in shares], group)
    found = read(messages, lengths, columns)
    for ranks in sharing:
        found = read(all_gather_ragged(message(found), ranks), lengths, columns)
    return found


def message(values: Mapping[int, Tensor]) -> Tensor:
    """[n] int32 message: number of samples, their indices, and their columns."""
    head = torch.tensor([len(values), *values], dtype=torch.int32)
    return torch.cat([head, torch.cat(list(values.values()), 1).flatten()]) if values else head


def read(messages: Sequence[Tensor], lengths: Mapping[int, int] | Sequence[int], columns: int) -> dict[int, Tensor]:
    """[C, L_i] int32 for each sample in the messages."""
    found: dict[int, Tensor] = {}
    for each in messages:
        start = 1 + int(each[0])
        indices = each[1:start].tolist()
        found |= zip(indices, each[start:].view(columns, -1).split([lengths[i] for i in indices], 1), strict=True)
    return found
