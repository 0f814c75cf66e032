"""How a step's samples are divided over optimizer updates and ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rlbatch.algorithms.advantages import Advantages
from rlbatch.api import Prompt, Sample
from rlbatch.config.schema import AlgorithmConfig, Config, LayoutConfig, TrainConfig
from rlbatch.pipeline.exchange import NO_LIMIT, Batch, Deal, Row
from rlbatch.pipeline.updates import Update, plan_updates, shuffled_groups

PROMPTS, SAMPLES = 6, 3
LENGTHS = [4 + (7 * index) % 11 for index in range(PROMPTS * SAMPLES)]
PROMPT_TOKENS = 2


def batch() -> Batch:
    """Sample i has tokens 100 i, 100 i + 1, ...; this rank has all."""
    lengths = torch.tensor(LENGTHS)
    return Batch(
        lengths=LENGTHS,
        rewards=torch.zeros(len(LENGTHS)),
        group_ids=torch.arange(PROMPTS).repeat_interleave(SAMPLES),
        truncated=torch.zeros(len(LENGTHS), dtype=torch.bool),
        lags=torch.zeros_like(lengths),
        sampled=lengths - PROMPT_TOKENS,
        new=lengths - PROMPT_TOKENS,
        limits=torch.full_like(lengths, NO_LIMIT, dtype=torch.int32),
        own={index: sample(index) for index in range(len(LENGTHS))},
    )


def sample(index: int) -> Sample:
    length = LENGTHS[index]
    return Sample(
        Prompt(index // SAMPLES, "", (0,) * PROMPT_TOKENS),
        index % SAMPLES,
        token_ids=100 * index + torch.arange(length),
        loss_mask=torch.tensor([0.0] * PROMPT_TOKENS + [1.0] * (length - PROMPT_TOKENS)),
        rollout_logprobs=torch.full((length,), -float(index)),
        response="",
        finish_reason="stop",
    )


def dealing(rank: int) -> Deal:
    """What comes to a rank."""
    return lambda shares: {i: Row(values) for i, values in batch().columns(shares[rank]).items()}


def config(updates: int, max_tokens: int = 20, aggregation: str = "token_mean", **layout: int) -> Config:
    return Config(
        train=TrainConfig(prompts_per_step=PROMPTS, updates_per_step=updates, max_tokens_per_gpu=max_tokens),
        layout=LayoutConfig(**layout),
        algorithm=replace(AlgorithmConfig(), loss_aggregation=aggregation),
    )


def plans(job: Config, dp_size: int) -> list[list[Update]]:
    """For each rank its updates."""
    return [plan_updates(batch(), job, rank, dp_size, dealing(rank)) for rank in range(dp_size)]


@pytest.mark.parametrize("updates", [1, 2, 3, 6])
@pytest.mark.parametrize("dp_size", [1, 2, 4, 20])
def test_groups_are_divided_in_prompt_order(updates: int, dp_size: int) -> None:
    """Update u has the u-th run of whole groups, each sample on exactly one rank, whatever the number of ranks."""
    ranks = plans(config(updates), dp_size)
    per_update = len(LENGTHS) // updates
    for number in range(updates):
        samples = sorted(sample for rank in ranks for sample in rank[number].samples)
        assert samples == list(range(number * per_update, (number + 1) * per_update))


@pytest.mark.parametrize(("dp_size", "max_tokens"), [(2, 20), (3, 5), (4, 30), (20, 20)])
def test_every_rank_has_as_many_packs(dp_size: int, max_tokens: int) -> None:
    """Collectives match: with dummies, ranks have equal numbers of packs in each update, and no more than the busiest needs."""
    ranks = plans(config(2, max_tokens), dp_size)
    for number in range(2):
        assert len({len(rank[number].packs) for rank in ranks}) == 1
        assert any(all(pack.sample_indices for pack in rank[number].packs) for rank in ranks)


@pytest.mark.parametrize("dp_size", [1, 2, 5])
def test_denominators_are_those_of_the_whole_update(dp_size: int) -> None:
    """The same on every rank: sampled tokens, or samples, of all ranks; dummies and prompts add nothing."""
    for aggregation, of in (("token_mean", lambda length: length - PROMPT_TOKENS), ("sequence_mean", lambda length: 1)):
        for rank in plans(config(2, aggregation=aggregation), dp_size):
            assert [update.denominator for update in rank] == [sum(map(of, LENGTHS[:9])), sum(map(of, LENGTHS[9:]))]


@pytest.mark.parametrize("layout", [{}, {"cp_size": 2}, {"tp_size": 2}, {"tp_size": 2, "cp_size": 2}])
def test_packs_hold_their_samples(layout: dict[str, int]) -> None:
    """Tokens and log-probs of each pack are its samples'; sequences are padded to what the layout cuts them into."""
    multiple = layout.get("tp_size", 1) * (4 if "cp_size" in layout else 1)
    for update in plan_updates(batch(), config(2, **layout), 1, 2, dealing(1)):
        seen = update.by_sample([pack.microbatch.token_ids for pack in update.packs])
        assert list(seen) == list(update.samples)
        assert all(torch.equal(tokens, sample(index).token_ids) for index, tokens in seen.items())
        logprobs = update.by_sample([pack.microbatch.rollout_logprobs for pack in update.packs])
        assert all(torch.equal(values, sample(index).rollout_logprobs * sample(index).loss_mask) for index, values in logprobs.items())
        for pack in update.packs:
            assert not (pack.microbatch.cu_seqlens % multiple).any()
            assert len(pack.microbatch.token_ids) <= 20 * layout.get("cp_size", 1)


def test_a_context_parallel_pack_is_larger() -> None:
    """The cap is tokens a GPU: twice as many fit into a pack that two share."""
    packs = {size: len(plan_updates(batch(), config(1, 24, cp_size=size), 0, 1, dealing(0))[0].packs) for size in (1, 2)}
    assert packs[2] < packs[1]


def test_advantages_reach_their_tokens() -> None:
    """Advantages of the whole batch, [R] a sample, land on the sampled tokens of the right samples."""
    advantages = [index + torch.arange(length - PROMPT_TOKENS) / 100 for index, length in enumerate(LENGTHS)]
    given = Advantages(torch.cat(advantages), batch().response_lengths, range(len(LENGTHS)))
    for update in plan_updates(batch(), config(3), 1, 2, dealing(1)):
        filled = update.with_advantages(given)
        for index, values in filled.by_sample([pack.microbatch.advantages for pack in filled.packs]).items():
            assert torch.equal(values, torch.cat([torch.zeros(PROMPT_TOKENS), advantages[index]]))


def test_later_epochs_have_the_groups_in_another_order() -> None:
    """Whole groups, each once, by seed, step and epoch alone; log-probs of the batch land on the tokens of their samples."""
    job = config(3)
    orders = [shuffled_groups(job.seed, step, epoch, PROMPTS) for step in (1, 2) for epoch in (1, 2)]
    assert all(sorted(order) == list(range(PROMPTS)) for order in orders)
    assert len(set(map(tuple, orders))) == 4
    assert orders[0] == shuffled_groups(job.seed, 1, 1, PROMPTS) != shuffled_groups(1, 1, 1, PROMPTS)
    logprobs = [-index - torch.arange(length) / 100 for index, length in enumerate(LENGTHS)]
    for dp_size in (1, 2):
        ranks = [plan_updates(batch(), job, rank, dp_size, dealing(rank), orders[0]) for rank in range(dp_size)]
        for number in range(3):
            samples = sorted(sample for rank in ranks for sample in rank[number].samples)
            assert {sample // SAMPLES for sample in samples} == set(orders[0][2 * number : 2 * number + 2])
            assert len(samples) == 2 * SAMPLES
            for update in (rank[number].with_logprobs("old_logprobs", logprobs) for rank in ranks):
                for index, values in update.by_sample([pack.microbatch.old_logprobs for pack in update.packs]).items():
                    assert torch.equal(values, logprobs[index] * sample(index).loss_mask)
