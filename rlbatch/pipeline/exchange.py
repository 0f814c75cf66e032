"""Exchanges samples between ranks: each rank generated some groups, every rank needs the numbers of all. Flat tensors, never pickles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from rlbatch.api import KeptTokens, Prompt, Sample, SampleGroup, Span
from rlbatch.collectives import all_gather_ragged


@dataclass(frozen=True)
class Batch:
    """All N samples of the step, in prompt order then sample order, on every rank.

    Attributes:
        token_ids: N tensors [L_i] int64.
        loss_mask: N tensors [L_i] float32.
        rollout_logprobs: N tensors [L_i] float32 nats.
        rewards: [N] float64.
        group_ids: [N] int64, position of the prompt in the step.
        truncated: [N] bool, cut at the length limit.
        lags: N tensors [L_i] int64, how many policy versions before the step's first one each token was sampled; 0 on prompts.
        kept: N times what the tokens were chosen from; empty: the whole vocabulary.
    """

    token_ids: list[Tensor]
    loss_mask: list[Tensor]
    rollout_logprobs: list[Tensor]
    rewards: Tensor
    group_ids: Tensor
    truncated: Tensor
    lags: list[Tensor]
    kept: Sequence[KeptTokens] = ()

    @cached_property
    def lengths(self) -> list[int]:
        """Tokens of each sample, prompt included."""
        return [len(tokens) for tokens in self.token_ids]

    @cached_property
    def response_lengths(self) -> Tensor:
        """[N] int64, sampled tokens of each sample."""
        return torch.tensor([int(mask.sum()) for mask in self.loss_mask])

    def without_truncated(self) -> Batch:
        """The batch with responses that the length limit cut masked: they count for no loss, denominator or advantage."""
        masks = [torch.zeros_like(mask) if cut else mask for mask, cut in zip(self.loss_mask, self.truncated.tolist(), strict=True)]
        return replace(self, loss_mask=masks)

    def without_old(self) -> Batch:
        """The batch with tokens of earlier policies masked; for losses, not for the rewards' statistics."""
        masks = [mask.where(lags == 0, 0.0) for mask, lags in zip(self.loss_mask, self.lags, strict=True)]
        return replace(self, loss_mask=masks)

    @cached_property
    def most_lag(self) -> int:
        """Of the tokens that are not masked."""
        return max([0, *(int(lags.where(mask > 0, 0).max()) for lags, mask in zip(self.lags, self.loss_mask, strict=True))])

    @cached_property
    def num_groups(self) -> int:
        """Prompts of the step."""
        return int(self.group_ids[-1]) + 1 if len(self.group_ids) else 0

    def name(self, index: int, prompts: Sequence[Prompt]) -> str:
        """What messages call a sample, e.g. ``prompt 17 sample 3``.

        Args:
            index: Of the sample.
            prompts: Of the step, in order.
        """
        position = self.group_ids[index]
        return f"prompt {prompts[int(position)].prompt_id} sample {index - int((self.group_ids < position).sum())}"


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


def exchange(groups: Sequence[SampleGroup], positions: Sequence[int], version: int = -1, *, with_kept: bool = False) -> Batch:
    """Gives every rank the samples of all ranks; a collective.

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

    def flat(values: list[Tensor], dtype: torch.dtype) -> Tensor:
        return torch.cat(all_gather_ragged(torch.cat([torch.empty(0, dtype=dtype), *(value.to(dtype) for value in values)])))

    per_sample = [
        torch.tensor([position, sample.sample_index, len(sample.token_ids), sample.finish_reason == "length"])
        for position, sample, _ in mine
    ]
    position, index, length, truncated = flat(per_sample, torch.int64).view(-1, 4).unbind(1)
    sizes = length.tolist()
    token_ids = flat([s.token_ids for _, s, _ in mine], torch.int64).split(sizes)
    loss_mask = flat([s.loss_mask for _, s, _ in mine], torch.float32).split(sizes)
    logprobs = flat([s.rollout_logprobs for _, s, _ in mine], torch.float32).split(sizes)
    lags = flat([lags_of(s, version) for _, s, _ in mine], torch.int64).split(sizes)
    rewards = flat([torch.tensor([reward for _, _, reward in mine], dtype=torch.float64)], torch.float64)
    kept: Sequence[KeptTokens] = ()
    if with_kept:
        own = [sample.kept for _, sample, _ in mine if sample.kept is not None]
        counts = flat([of_sample.counts for of_sample in own], torch.int64).split(sizes)
        ids = flat([of_sample.ids for of_sample in own], torch.int32).split([int(of_sample.sum()) for of_sample in counts])
        kept = list(map(KeptTokens, ids, counts))
    order = sorted(range(len(sizes)), key=lambda i: (int(position[i]), int(index[i])))
    return Batch(
        token_ids=[token_ids[i] for i in order],
        loss_mask=[loss_mask[i] for i in order],
        rollout_logprobs=[logprobs[i] for i in order],
        rewards=rewards[order],
        group_ids=position[order],
        truncated=truncated[order].bool(),
        lags=[lags[i] for i in order],
        kept=[kept[i] for i in order] if with_kept else (),
    )


def lags_of(sample: Sample, version: int) -> Tensor:
    """[L] int64, how many policy versions before ``version`` each token of a sample was sampled; 0 where one of both is not known."""
    lags = torch.zeros(len(sample.token_ids), dtype=torch.int64)
    before = len(sample.prompt.token_ids)
    for span in sample.spans or [Span(sample.policy_version, before, len(lags))]:
        if min(version, span.policy_version) >= 0:
            lags[span.start : span.end] = version - span.policy_version
    return lags
