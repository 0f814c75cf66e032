"""Sample groups made by hand, and their way through the exchange on the ranks of a pool."""

from __future__ import annotations

from unittest import mock

import torch

from rlbatch.api import KeptTokens, Prompt, Sample, SampleGroup, Span
from rlbatch.config.schema import LayoutConfig
from rlbatch.megatron import parallel
from rlbatch.pipeline.exchange import Batch, Row, deal, deal_values, exchange

LARGE = 2**24 + 1
"""The first integer that float32 does not have."""
GROUPS, SAMPLES = 5, 3
VERSION = 6
"""Of the step's first policy."""


def group(position: int) -> SampleGroup:
    """A group whose every number follows from its position in the step; prompts and responses of different lengths."""
    prompt = Prompt(prompt_id=100 + position, text="", token_ids=tuple(range(2 + position % 3)))
    made = []
    for index in range(SAMPLES):
        before, after = len(prompt.token_ids), 1 + (position + 2 * index) % 4
        made.append(
            Sample(
                prompt=prompt,
                sample_index=index,
                token_ids=torch.arange(before + after) + LARGE + 100 * position + 10 * index,
                loss_mask=torch.tensor([0.0] * before + [1.0] * after),
                rollout_logprobs=torch.tensor([0.0] * before + [-(position + index / 8.0)] * after),
                response="",
                finish_reason="length" if (position + index) % 2 else "stop",
                policy_version=VERSION - (position == 1),
                kept=kept(position, index, before, after),
                spans=(Span(VERSION - 2, before, before + 1), Span(VERSION, before + 1, before + after)) if position == 3 else (),
            )
        )
    return SampleGroup(prompt, made, rewards=[1e8 + position + index / 10 for index in range(SAMPLES)])


def long_group(length: int) -> SampleGroup:
    """One sample with a response of so many tokens."""
    prompt = Prompt(prompt_id=0, text="", token_ids=(1,))
    row = torch.zeros(1 + length)
    return SampleGroup(prompt, [Sample(prompt, 0, row.long(), row, row, response="", finish_reason="length")], rewards=[0.0])


def kept(position: int, index: int, before: int, after: int) -> KeptTokens:
    """What a sample's tokens were chosen from: as many as the place of the token in the response, from 0."""
    counts = torch.tensor([0] * before + list(range(after)))
    return KeptTokens((torch.arange(int(counts.sum())) + 10 * position + index).int(), counts)


def exchanged(distribution: list[list[int]]) -> Batch:
    """The batch on this rank, which generated the groups at ``distribution[rank]``."""
    mine = distribution[torch.distributed.get_rank()]
    return exchange([group(position) for position in mine], mine, VERSION, with_kept=True)


def dealt(distribution: list[list[int]], layout: LayoutConfig, shares: list[list[int]], how: str) -> tuple[int, dict[int, Row]]:
    """This rank's data-parallel rank, and the rows that it got, in rounds of a few tokens. Their log-probs came over another division, as
    in a later epoch. ``how`` names a method of the batch, by which something is masked.
    """
    parallel.initialize_groups(layout, 0)
    batch, dp_rank, group = exchanged(distribution), parallel.dp_rank(), parallel.dp_group()
    with mock.patch("rlbatch.pipeline.exchange.ROUND_TOKENS", 10):
        rows = deal(getattr(batch, how)() if how else batch, shares, group, parallel.sharing_groups())
    others = deal_values({i: row.logprobs for i, row in rows.items()}, shares[::-1], batch.lengths, group)
    back = deal_values(others, shares, batch.lengths, group)
    assert sorted(others) == sorted(shares[::-1][dp_rank])
    return dp_rank, {i: Row(torch.stack([row.token_ids, back[i].view(torch.int32), row.ages]), row.kept) for i, row in rows.items()}
