"""After the exchange every rank has all samples, in prompt order, whoever generated them."""

from __future__ import annotations

import pytest
import torch

from rlbatch.pipeline.exchange import Batch
from tests.pipeline.samples import GROUPS, SAMPLES, exchanged, group

DISTRIBUTIONS = {
    "dealt out": [[0, 2, 4], [1, 3]],
    "halves": [[0, 1, 2], [3, 4]],
    "disordered": [[4, 1], [3, 0, 2]],
    "first rank has none": [[], [0, 1, 2, 3, 4]],
    "last rank has none": [[2, 1, 0, 4, 3], []],
}


def assert_complete(batch: Batch) -> None:
    """The batch is what one rank would have made of all groups, computed here by hand."""
    samples = [sample for position in range(GROUPS) for sample in group(position).samples]
    for name in ("token_ids", "loss_mask", "rollout_logprobs"):
        ours = getattr(batch, name)
        assert len(ours) == len(samples)
        assert all(torch.equal(one, getattr(sample, name)) for one, sample in zip(ours, samples, strict=True)), name
    assert batch.rewards.tolist() == [reward for position in range(GROUPS) for reward in group(position).rewards]
    assert batch.group_ids.tolist() == [position for position in range(GROUPS) for _ in range(SAMPLES)]
    assert batch.truncated.tolist() == [sample.finish_reason == "length" for sample in samples]
    assert batch.lengths == [len(sample.token_ids) for sample in samples]
    assert batch.response_lengths.tolist() == [sample.response_length for sample in samples]
    kept = [sample.kept for sample in samples if sample.kept is not None]
    assert [of_sample.ids.tolist() for of_sample in batch.kept] == [of_sample.ids.tolist() for of_sample in kept]
    assert [of_sample.counts.tolist() for of_sample in batch.kept] == [of_sample.counts.tolist() for of_sample in kept]
    assert batch.truncated.dtype == torch.bool


@pytest.mark.parametrize("distribution", DISTRIBUTIONS.values(), ids=DISTRIBUTIONS)
def test_any_distribution_gives_the_same_batch(distribution: list[list[int]], rank_pool) -> None:
    """Groups dealt out in any way, also all to one rank; token ids above 2^24 and rewards of 10 digits arrive exactly."""
    for batch in rank_pool(2).run(exchanged, distribution):
        assert_complete(batch)


def test_one_rank(rank_pool) -> None:
    """Alone, the exchange only sorts."""
    [batch] = rank_pool(1).run(exchanged, [[3, 0, 4, 1, 2]])
    assert_complete(batch)


def test_samples_have_names(rank_pool) -> None:
    """Messages call a sample by its prompt's place in the file and by its own in the group."""
    prompts = [group(position).prompt for position in range(GROUPS)]
    [batch] = rank_pool(1).run(exchanged, [list(range(GROUPS))])
    assert batch.name(0, prompts) == "prompt 100 sample 0"
    assert batch.name(2 * SAMPLES + 1, prompts) == "prompt 102 sample 1"
