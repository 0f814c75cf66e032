"""Exchanges samples between ranks. Every rank gets the numbers of all, and of an update those tokens that it trains on. Flat tensors, never
pickles.
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
"""That a rank gives at once, on average: what is on its way is held up to four times, 12 bytes a token."""
Shares = Sequence[Sequence[int]]
"""Of each data-parallel rank the samples that it trains on, by their indices in the batch."""


class Row(NamedTuple):
    """What is trained on of a sample.

    Attributes:
        columns: [3 or more, L] int32, of ``Batch.columns``: a rank has ten thousands of samples, and a view takes half a kilobyte.
        kept: What the tokens were chosen from; None: the whole vocabulary.
        routes: Of the tokens, in this rank's layers; None: the routers choose.
    """

    columns: Tensor
    kept: KeptTokens | None = None
    routes: Routes | None = None

    @property
    def token_ids(self) -> Tensor:
        """[L] int32."""
        return self.columns[0]

    @property
    def logprobs(self) -> Tensor:
        """[L] float32 nats, the engine's."""
        return self.columns[1].view(torch.float32)

    @property
    def ages(self) -> Tensor:
        """[L] int32, how many policy versions before the step's first one the token was sampled; -1: it is masked."""
        return self.columns[2]


Deal = Callable[[Shares], Mapping[int, Row]]
"""Gives each data-parallel rank the rows of its share; a collective."""


@dataclass(frozen=True)
class Batch:
    """All N samples of the step, in prompt order then sample order: their numbers on every rank, their tokens on the one that sampled them.

    Attributes:
        lengths: N times tokens, prompt included.
        rewards: [N] float64.
        group_ids: [N] int64, position of the prompt in the step.
        truncated: [N] bool, cut at the length limit.
        lags: [N] int64, how many policy versions before the step's first one the oldest token was sampled.
        sampled: [N] int64, sampled tokens.
        new: [N] int64, those of them that the step's first policy sampled.
        limits: [N] int32, ages of tokens that count; older ones are masked.
        own: This rank's samples, by index.
        version: Of the step's first policy; -1: not known.
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
        """[N] int64, sampled tokens of each sample that count."""
        return self.sampled.where(self.limits > 0, self.new_lengths)

    @cached_property
    def new_lengths(self) -> Tensor:
        """[N] int64, those of them that the step's first policy sampled."""
        return self.new.where(self.limits >= 0, 0)

    @cached_property
    def most_lag(self) -> int:
        """Of the tokens that are not masked."""
        lags: list[int] = torch.minimum(self.lags, self.limits).tolist()
        return max([0, *lags])

    @cached_property
    def num_groups(self) -> int:
        """Prompts of the step."""
        return int(self.group_ids[-1]) + 1 if len(self.group_ids) else 0

    def without_truncated(self) -> Batch:
        """The batch with responses that the length limit cut masked: they count for no loss, denominator or advantage."""
        return replace(self, limits=self.limits.masked_fill(self.truncated, -1))

    def without_old(self) -> Batch:
        """The batch with tokens of earlier policies masked; for losses, not for the rewards' statistics."""
        return replace(self, limits=self.limits.clamp(max=0))

    def name(self, index: int, prompts: Sequence[Prompt]) -> str:
        """What messages call a sample, e.g. ``prompt 17 sample 3``.

        Args:
            index: Of the sample.
            prompts: Of the step, in order.
        """
        position = self.group_ids[index]
        return f"prompt {prompts[int(position)].prompt_id} sample {index - int((self.group_ids < position).sum())}"

    def columns(self, indices: Sequence[int]) -> dict[int, Tensor]:
        """Of some of this rank's samples [C, L_i] int32: tokens, bits of log-probs, ages and, if there are, counts of ``KeptTokens``."""
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
    """Tells every rank the numbers of all ranks' samples; a collective.

    Args:
        groups: This rank's scored groups.
        positions: Of their prompts in the step.
        version: Of the step's first policy; -1: not known, then no token is old.
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
        batch: Whose samples are dealt.
        shares: Of each rank of ``group``; no sample twice.
        group: Data-parallel ranks.
        sharing: Groups that together have all ranks of one share.
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
    """Gives each rank of a group one value of each token of its share; a collective.

    Args:
        mine: [L_i] float32 of this rank's samples, by index.
        shares: Of each rank of the group.
        lengths: L_i of all N samples.
        group: Its ranks together have every sample once.
    """
    found = dealt({i: values.view(torch.int32)[None] for i, values in mine.items()}, shares, lengths, 1, group)
    return {i: values[0].view(torch.float32) for i, values in found.items()}


def all_gather_samples(mine: Mapping[int, Tensor], lengths: Sequence[int], group: Any) -> list[Tensor]:
    """Gathers one tensor a sample, each from the rank that has it.

    Args:
        mine: [L_i] float32 or float64 for each of this rank's samples, by index.
        lengths: L_i of all N samples.
        group: Process group, whose ranks together have every sample once.

    Returns:
        N tensors float64.
    """
    owned = torch.cat(all_gather_ragged(torch.tensor(list(mine), dtype=torch.int64), group)).tolist()
    # A rank without samples has no dtype to go by: doubles hold every float32.
    values = torch.cat(all_gather_ragged(torch.cat([torch.empty(0, dtype=torch.float64), *(v.double() for v in mine.values())]), group))
    by_sample = dict(zip(owned, values.split([lengths[i] for i in owned]), strict=True))
    return [by_sample[i] for i in range(len(lengths))]


def lags_of(sample: Sample, version: int) -> Tensor:
    """[L] int64, how many policy versions before ``version`` each token of a sample was sampled; 0 where one of both is not known."""
    lags = torch.zeros(len(sample.token_ids), dtype=torch.int64)
    for span in _spans(sample):
        if min(version, span.policy_version) >= 0:
            lags[span.start : span.end] = version - span.policy_version
    return lags


def _spans(sample: Sample) -> Sequence[Span]:
    return sample.spans or [Span(sample.policy_version, len(sample.prompt.token_ids), len(sample.token_ids))]


def _lag(sample: Sample, version: int) -> int:
    """Of the oldest token."""
    return max(version - span.policy_version if min(version, span.policy_version) >= 0 else 0 for span in _spans(sample))


def _ages(samples: Sequence[Sample], version: int) -> Tensor:
    """[T] int32 of all their tokens, see ``Row``."""
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
    """[C, L_i] int32 of each sample of this rank's share, of those that ranks have; a collective of ``group`` and of ``sharing``."""
    messages = all_to_all_ragged([message({i: mine[i] for i in share if i in mine}) for share in shares], group)
    found = read(messages, lengths, columns)
    for ranks in sharing:
        found = read(all_gather_ragged(message(found), ranks), lengths, columns)
    return found


def message(values: Mapping[int, Tensor]) -> Tensor:
    """[n] int32: how many samples, which, and their columns."""
    head = torch.tensor([len(values), *values], dtype=torch.int32)
    return torch.cat([head, torch.cat(list(values.values()), 1).flatten()]) if values else head


def read(messages: Sequence[Tensor], lengths: Mapping[int, int] | Sequence[int], columns: int) -> dict[int, Tensor]:
    """[C, L_i] int32 of each sample that messages have."""
    found: dict[int, Tensor] = {}
    for each in messages:
        start = 1 + int(each[0])
        indices = each[1:start].tolist()
        found |= zip(indices, each[start:].view(columns, -1).split([lengths[i] for i in indices], 1), strict=True)
    return found
