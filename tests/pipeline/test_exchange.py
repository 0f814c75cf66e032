"""After the exchange every rank has the numbers of all samples, in prompt order, whoever generated them, and the tokens of its share."""

from __future__ import annotations

import pytest
import torch

from rlbatch.api import Sample
from rlbatch.config.schema import LayoutConfig
from rlbatch.pipeline.exchange import Batch, lags_of
from tests.pipeline.samples import GROUPS, SAMPLES, VERSION, dealt, exchanged, group

DISTRIBUTIONS = {
    "dealt out": [[0, 2, 4], [1, 3]],
    "halves": [[0, 1, 2], [3, 4]],
    "disordered": [[4, 1], [3, 0, 2]],
    "first rank has none": [[], [0, 1, 2, 3, 4]],
    "last rank has none": [[2, 1, 0, 4, 3], []],
}
ALL = [sample for position in range(GROUPS) for sample in group(position).samples]


def ages(sample: Sample) -> torch.Tensor:
    return lags_of(sample, VERSION).where(sample.loss_mask > 0, -1)


def assert_complete(batch: Batch, mine: list[int]) -> None:
    """The batch is what one rank would have made of all groups, computed here by hand; the tokens are of the groups that this rank had."""
    assert batch.lengths == [len(sample.token_ids) for sample in ALL]
    assert batch.rewards.tolist() == [reward for position in range(GROUPS) for reward in group(position).rewards]
    assert batch.group_ids.tolist() == [position for position in range(GROUPS) for _ in range(SAMPLES)]
    assert batch.truncated.tolist() == [sample.finish_reason == "length" for sample in ALL]
    assert batch.truncated.dtype == torch.bool
    assert batch.lags.tolist() == [int(ages(sample).max()) for sample in ALL]
    assert batch.response_lengths.tolist() == [sample.response_length for sample in ALL]
    assert batch.new_lengths.tolist() == [int((ages(sample) == 0).sum()) for sample in ALL]
    assert batch.most_lag == 2
    whole = batch.without_truncated()
    assert whole.response_lengths.tolist() == [0 if s.finish_reason == "length" else s.response_length for s in ALL]
    assert batch.without_old().response_lengths.tolist() == batch.new_lengths.tolist()
    assert batch.without_old().most_lag == 0
    assert list(batch.own) == [index for index in range(len(ALL)) if index // SAMPLES in mine]
    assert all(torch.equal(sample.token_ids, ALL[index].token_ids) for index, sample in batch.own.items())


@pytest.mark.parametrize("distribution", DISTRIBUTIONS.values(), ids=DISTRIBUTIONS)
def test_any_distribution_gives_the_same_batch(distribution: list[list[int]], rank_pool) -> None:
    """Groups dealt out in any way, also all to one rank; rewards of 10 digits arrive exactly."""
    for batch, mine in zip(rank_pool(2).run(exchanged, distribution), distribution, strict=True):
        assert_complete(batch, mine)


def test_one_rank(rank_pool) -> None:
    """Alone, the exchange only sorts."""
    [batch] = rank_pool(1).run(exchanged, [[3, 0, 4, 1, 2]])
    assert_complete(batch, [0, 1, 2, 3, 4])


def test_samples_have_names(rank_pool) -> None:
    """Messages call a sample by its prompt's place in the file and by its own in the group."""
    prompts = [group(position).prompt for position in range(GROUPS)]
    [batch] = rank_pool(1).run(exchanged, [list(range(GROUPS))])
    assert batch.name(0, prompts) == "prompt 100 sample 0"
    assert batch.name(2 * SAMPLES + 1, prompts) == "prompt 102 sample 1"


@pytest.mark.parametrize(
    ("layout", "distribution"),
    [
        ({}, [[0, 2, 4], [1, 3], [], []]),
        ({"pp_size": 2}, [[], [3, 1], [0], [4, 2]]),
        ({"tp_size": 2}, [[0, 1, 2, 3, 4], [], [], []]),
        ({"tp_size": 2, "pp_size": 2}, [[4], [3], [2, 1], [0]]),
        ({"cp_size": 2, "pp_size": 2}, [[], [], [], [2, 1, 0, 4, 3]]),
    ],
    ids=str,
)
def test_tokens_go_to_who_trains_on_them(layout: dict[str, int], distribution: list[list[int]], rank_pool) -> None:
    """Under every layout each rank gets the tokens of its share and no others, whoever generated them, bit by bit: token ids above 2^24,
    log-probs, how old each token is, and what it was chosen from. What is left out of training is masked.
    """
    config = LayoutConfig(world_size=4, ep_size=1, **layout)
    dp_size = 4 // (config.tp_size * config.pp_size * config.cp_size)
    shares = [[index for index in range(len(ALL)) if index % 5 % dp_size == rank] for rank in range(dp_size)]
    for how in ("", "without_truncated", "without_old"):
        for dp_rank, rows in rank_pool(4).run(dealt, distribution, config, shares, how):
            assert sorted(rows) == shares[dp_rank]
            for index, row in rows.items():
                sample, expected = ALL[index], ages(ALL[index])
                if how == "without_old":
                    expected = expected.where(expected <= 0, -1)
                elif how and sample.finish_reason == "length":
                    expected = torch.full_like(expected, -1)
                assert torch.equal(row.token_ids.long(), sample.token_ids)
                assert torch.equal(row.logprobs, sample.rollout_logprobs)
                assert torch.equal(row.ages.long(), expected)
                assert sample.kept and row.kept
                assert torch.equal(row.kept.ids, sample.kept.ids)
                assert torch.equal(row.kept.counts, sample.kept.counts)
