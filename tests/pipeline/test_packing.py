from __future__ import annotations

import math
import random

import pytest
import torch

from rlbatch.pipeline.packing import (
    Pack,
    assign_to_ranks,
    build_microbatches,
    pack,
    pad_with_dummies,
    sequence_multiple,
    split_by_sample,
    with_advantages,
)

SEEDS = range(40)


def random_lengths(seed: int) -> tuple[list[int], int]:
    """Lengths of many shapes and a cap; some seeds have samples above it."""
    generator = random.Random(seed)
    cap = generator.choice([64, 500, 4096])
    longest = int(cap * generator.choice([0.2, 0.5, 1.0, 1.5]))
    return [generator.randint(1, longest) for _ in range(generator.randint(0, 300))], cap


def fewest_packs(lengths: list[int], cap: int) -> int:
    """A lower bound (Martello and Toth's L2): what is longer than cap - t shares a pack with nothing that is at least t."""
    fitting = [length for length in lengths if length <= cap]
    bound = math.ceil(sum(fitting) / cap)
    for least in range(1, cap // 2 + 1):
        alone = sum(length > cap - least for length in fitting)
        half = [length for length in fitting if cap / 2 < length <= cap - least]
        small = sum(length for length in fitting if least <= length <= cap / 2)
        bound = max(bound, alone + len(half) + max(0, math.ceil((small - (len(half) * cap - sum(half))) / cap)))
    return bound + len(lengths) - len(fitting)


@pytest.mark.parametrize("seed", SEEDS)
def test_packs_lose_nothing_and_keep_the_cap(seed: int) -> None:
    """Every sample is in exactly one pack, no pack exceeds the cap, a longer sample is alone, and few packs are used."""
    lengths, cap = random_lengths(seed)
    packs = pack(lengths, cap)
    assert sorted(index for indices in packs for index in indices) == list(range(len(lengths)))
    for indices in packs:
        assert indices == sorted(indices)
        assert len(indices) == 1 or sum(lengths[i] for i in indices) <= cap
    assert len(packs) <= 1.05 * fewest_packs(lengths, cap) + 1
    assert packs == pack(list(lengths), cap)


def first_fit(lengths: list[int], cap: int) -> list[list[int]]:
    """First-fit-decreasing as it is defined: each sample looks at one pack after the other."""
    packs: list[list[int]] = []
    free: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        place = next((p for p, tokens in enumerate(free) if tokens >= lengths[index]), len(packs))
        if place == len(packs):
            packs.append([])
            free.append(cap)
        packs[place].append(index)
        free[place] -= lengths[index]
    return [sorted(indices) for indices in packs]


@pytest.mark.parametrize("seed", SEEDS)
def test_packs_are_those_of_first_fit(seed: int) -> None:
    """The tree finds the pack that looking at all of them finds: the same packs in the same order, samples without tokens included."""
    lengths, cap = random_lengths(seed)
    assert pack(lengths, cap) == first_fit(lengths, cap)
    generator = random.Random(seed)
    for _ in range(50):
        small = [generator.randint(0, 7) for _ in range(generator.randint(0, 9))]
        assert pack(small, cap := generator.randint(1, 6)) == first_fit(small, cap)


@pytest.mark.parametrize("seed", SEEDS)
def test_ranks_lose_nothing_and_are_balanced(seed: int) -> None:
    """Every sample is on exactly one rank; the fullest rank is within LPT's 4/3 of the bound, and near it when samples are many."""
    lengths, _ = random_lengths(seed)
    dp_size = random.Random(seed).choice([1, 2, 3, 8])
    ranks = assign_to_ranks(lengths, dp_size)
    assert len(ranks) == dp_size
    assert sorted(index for indices in ranks for index in indices) == list(range(len(lengths)))
    assert all(indices == sorted(indices) for indices in ranks)
    loads = [sum(lengths[i] for i in indices) for indices in ranks]
    longest = sorted(lengths, reverse=True)
    # Two of the dp_size + 1 longest samples must share a rank.
    pair = longest[dp_size - 1] + longest[dp_size] if len(lengths) > dp_size else 0
    bound = max(math.ceil(sum(lengths) / dp_size), max(lengths, default=0), pair)
    assert max(loads) <= 4 / 3 * bound
    if len(lengths) >= 20 * dp_size:
        assert max(loads) <= 1.05 * bound


def test_equal_lengths_are_shared_equally() -> None:
    """Equal samples are dealt out evenly, also when there are more ranks than samples, and when they have no tokens."""
    assert assign_to_ranks([4] * 6, 3) == [[0, 3], [1, 4], [2, 5]]
    assert assign_to_ranks([4, 4], 3) == [[0], [1], []]
    assert [len(indices) for indices in assign_to_ranks([0] * 6, 3)] == [2, 2, 2]


def test_sequence_multiple() -> None:
    """Context parallelism needs 2 x cp pieces of a sequence, each divisible by tp."""
    assert [sequence_multiple(tp, cp) for tp, cp in ((1, 1), (4, 1), (1, 2), (4, 2))] == [1, 4, 4, 16]


def random_samples(seed: int, count: int = 30) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, 40, (count,), generator=generator).tolist()
    tokens = [torch.randint(1, 1000, (length,), generator=generator) for length in lengths]
    masks = [(torch.rand(length, generator=generator) > 0.3).float() for length in lengths]
    masks[0] = torch.zeros(lengths[0])
    return tokens, masks, [torch.randn(length, generator=generator) for length in lengths]


def spans(item: Pack) -> list[tuple[int, int, int, int]]:
    """(start, end of the sample, end of its padding, sample index) of each sequence."""
    starts = item.microbatch.cu_seqlens.tolist()
    return [
        (starts[k], starts[k] + length, starts[k + 1], index)
        for k, (length, index) in enumerate(zip(item.lengths, item.sample_indices, strict=True))
    ]


@pytest.mark.parametrize("pad_multiple", [1, 2, 8])
@pytest.mark.parametrize("max_tokens", [1, 50, 200])
def test_microbatches_hold_the_samples(pad_multiple: int, max_tokens: int) -> None:
    """Sequences carry their sample's tokens, mask and log-probs; padding and first tokens are masked; padded lengths fit and count."""
    tokens, masks, logprobs = random_samples(pad_multiple)
    packs = build_microbatches(tokens, masks, logprobs, max_tokens=max_tokens, pad_multiple=pad_multiple)
    assert sorted(index for item in packs for index in item.sample_indices) == list(range(len(tokens)))
    for item in packs:
        batch = item.microbatch
        assert batch.cu_seqlens.dtype == torch.int32
        assert batch.token_ids.dtype == torch.int64
        assert batch.cu_seqlens[-1] == len(batch.token_ids)
        assert len(item.lengths) == 1 or len(batch.token_ids) <= max_tokens
        assert not batch.advantages.any()
        for start, end, next_start, index in spans(item):
            assert (next_start - start) % pad_multiple == 0
            assert next_start - end < pad_multiple
            expected = masks[index].clone()
            expected[0] = 0
            assert torch.equal(batch.token_ids[start:end], tokens[index])
            assert torch.equal(batch.loss_mask[start:end], expected)
            assert torch.equal(batch.rollout_logprobs[start:end], logprobs[index] * expected)
            sequence = batch.sequence_ids[start:next_start]
            assert (sequence == sequence[0]).all()
            assert batch.sampled_tokens[sequence[0]] == expected.sum()
            for values in (batch.token_ids, batch.loss_mask, batch.rollout_logprobs):
                assert not values[end:next_start].any()


def test_masked_values_do_not_enter() -> None:
    """NaN log-probs or advantages at masked positions become 0."""
    nan = float("nan")
    packs = build_microbatches(
        [torch.tensor([5, 6, 7])], [torch.tensor([0, 1, 0.0])], [torch.tensor([nan, -1.0, nan])], max_tokens=8, pad_multiple=4
    )
    (item,) = with_advantages(packs, [torch.tensor([nan, 2.0, nan])])
    assert item.microbatch.rollout_logprobs.tolist() == [0, -1, 0, 0]
    assert item.microbatch.advantages.tolist() == [0, 2, 0, 0]


@pytest.mark.parametrize("pad_multiple", [1, 8])
def test_results_find_their_sample(pad_multiple: int) -> None:
    """Cutting packs back into samples undoes packing, for any order of packs, with dummies among them."""
    tokens, masks, logprobs = random_samples(3)
    packs = build_microbatches(tokens, masks, logprobs, max_tokens=100, pad_multiple=pad_multiple)
    packs = pad_with_dummies(packs, len(packs) + 2, pad_multiple)
    random.Random(0).shuffle(packs)
    back = split_by_sample(packs, [item.microbatch.token_ids for item in packs])
    assert len(back) == len(tokens)
    assert all(torch.equal(one, other) for one, other in zip(back, tokens, strict=True))


def test_advantages_are_aligned_to_the_response() -> None:
    """Advantages of R tokens go to the last R tokens of their sample, unmasked ones only; the packs that were given stay as they were."""
    tokens = [torch.arange(1, 6), torch.arange(1, 4)]
    masks = [torch.tensor([0, 0, 1, 0, 1.0]), torch.tensor([0, 1, 1.0])]
    packs = build_microbatches(tokens, masks, masks, max_tokens=12, pad_multiple=4)
    filled = with_advantages(packs, [torch.tensor([0.1, 0.2, 0.3]), torch.tensor([7.0, 8.0])])
    assert filled[0].microbatch.advantages.tolist() == pytest.approx([0, 0, 0.1, 0, 0.3, 0, 0, 0, 0, 7, 8, 0])
    assert not packs[0].microbatch.advantages.any()


def test_dummies_are_fully_masked_sequences() -> None:
    """A dummy is one masked sequence of at least 2 tokens, divisible like any other, and carries no sample."""
    for pad_multiple, length in ((1, 2), (2, 2), (8, 8)):
        (dummy,) = pad_with_dummies([], 1, pad_multiple)
        assert dummy.microbatch.cu_seqlens.tolist() == [0, length]
        assert not dummy.microbatch.loss_mask.any()
        assert dummy.microbatch.sampled_tokens.tolist() == [0]
        assert dummy.sample_indices == ()


def test_fewer_microbatches_than_packs_is_an_error() -> None:
    """A count below the number of packs would lose samples: it is refused."""
    packs = build_microbatches(*random_samples(0), max_tokens=10)
    with pytest.raises(ValueError, match="packs on this rank"):
        pad_with_dummies(packs, len(packs) - 1)


def test_no_samples_make_no_packs() -> None:
    """A rank without samples has no packs, until dummies join."""
    assert build_microbatches([], [], [], max_tokens=10) == []
    assert split_by_sample(pad_with_dummies([], 2), [torch.zeros(2), torch.zeros(2)]) == []
