from __future__ import annotations

import pytest
import torch

from rlbatch.algorithms.aggregate import AGGREGATIONS, denominator, loss_weights
from rlbatch.api import ConfigError, Microbatch
from rlbatch.pipeline.packing import assign_to_ranks, build_microbatches, pad_with_dummies, with_advantages

LENGTHS = [5, 2, 9, 3, 7, 4, 6]


def step() -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """Tokens, masks and losses of 7 samples; sample 3 is fully masked, sample 4 has a masked token in the middle."""
    generator = torch.Generator().manual_seed(0)
    tokens = [torch.randint(1, 50, (length,), generator=generator) for length in LENGTHS]
    masks = [torch.cat([torch.zeros(1), torch.ones(length - 1)]) for length in LENGTHS]
    masks[3] = torch.zeros(3)
    masks[4][3] = 0.0
    return tokens, masks, [torch.randn(length, generator=generator) for length in LENGTHS]


def microbatches(dp_size: int, max_tokens: int, pad_multiple: int) -> list[Microbatch]:
    """All microbatches of all ranks, dummies included; the advantages carry the losses."""
    tokens, masks, losses = step()
    packs = []
    for indices in assign_to_ranks(LENGTHS, dp_size):
        own = [[values[i] for i in indices] for values in (tokens, masks, losses)]
        built = build_microbatches(own[0], own[1], own[2], max_tokens=max_tokens, pad_multiple=pad_multiple)
        packs += with_advantages(pad_with_dummies(built, len(built) + 1, pad_multiple), own[2])
    return [item.microbatch for item in packs]


def mean(batches: list[Microbatch], aggregation: str) -> float:
    weights = [loss_weights(b.loss_mask, b.sequence_ids, b.sampled_tokens, aggregation) for b in batches]
    total = sum(float((b.advantages * weight).double().sum()) for b, weight in zip(batches, weights, strict=True))
    return total / sum(denominator(b.loss_mask, b.cu_seqlens, aggregation) for b in batches)


@pytest.mark.parametrize("dp_size", [1, 2, 3])
@pytest.mark.parametrize("max_tokens", [1, 12, 1000])
@pytest.mark.parametrize("pad_multiple", [1, 4])
def test_the_mean_does_not_depend_on_the_split(dp_size: int, max_tokens: int, pad_multiple: int) -> None:
    """Token mean and sequence mean are those of the samples for every data-parallel size, cap and padding, dummies included."""
    _, masks, losses = step()
    batches = microbatches(dp_size, max_tokens, pad_multiple)
    rows = [loss[mask > 0].double() for loss, mask in zip(losses, masks, strict=True) if mask.any()]
    assert mean(batches, "token_mean") == pytest.approx(float(torch.cat(rows).mean()), rel=1e-6)
    assert mean(batches, "sequence_mean") == pytest.approx(float(torch.stack([row.mean() for row in rows]).mean()), rel=1e-6)


def test_denominators_are_counts() -> None:
    """Tokens: unmasked ones. Sequences: those with an unmasked token; a fully masked one does not count, nor does a dummy."""
    mask = torch.tensor([0, 1, 1, 0, 0, 0, 0, 1, 0, 0.0])
    starts = torch.tensor([0, 3, 6, 8, 10], dtype=torch.int32)
    assert denominator(mask, starts, "token_mean") == 3
    assert denominator(mask, starts, "sequence_mean") == denominator(mask, starts, "sequence_sum") == 2
    assert denominator(mask, starts, "sequence_sum_norm", 12.5) == 25
    (dummy,) = pad_with_dummies([], 1)
    for aggregation in AGGREGATIONS:
        assert denominator(dummy.microbatch.loss_mask, dummy.microbatch.cu_seqlens, aggregation) == 0


def test_known_numbers() -> None:
    """The conventions do not move: rows of 4, 3 and 3 tokens and one fully masked row, literal means."""
    losses = torch.tensor([-1.28, -0.9048374, -1.1051709, -1, 0.64, 1.3189770, 0.8410169, 0.8, 9.6057729, 1.04, 1.3, 1.04, 5, 5, 5, 5])
    mask = torch.tensor([1, 1, 1, 1, 1, 1, 1, 0, 1, 1, 0, 1, 0, 0, 0, 0.0])
    sequence, sampled = torch.arange(4).repeat_interleave(4), mask.view(4, 4).sum(1)
    starts = torch.tensor([0, 4, 8, 12, 16])
    totals = {name: float((losses * loss_weights(mask, sequence, sampled, name)).sum()) for name in AGGREGATIONS}
    means = {name: total / denominator(mask, starts, name, 8.0) for name, total in totals.items()}
    sums = {"sequence_sum": 10.195758 / 3, "sequence_sum_norm": 10.195758 / 3 / 8}
    assert means == pytest.approx({"token_mean": 1.0195758, "sequence_mean": 1.2520290, **sums}, abs=1e-6)


def test_unknown_aggregation() -> None:
    """An unknown aggregation is refused with the names that exist."""
    ids, refused = torch.zeros(1, dtype=torch.int64), r"algorithm\.loss_aggregation=sum: .*token_mean, .* or sequence_sum_norm"
    with pytest.raises(ConfigError, match=refused):
        loss_weights(torch.zeros(1), ids, torch.zeros(1), "sum")
    with pytest.raises(ConfigError, match=refused):
        denominator(torch.zeros(1), torch.zeros(2, dtype=torch.int64), "sum")
