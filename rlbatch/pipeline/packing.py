"""Assigns samples to data-parallel ranks, packs them into microbatches under a token cap, and cuts results back into samples."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from rlbatch.api import KeptTokens, Microbatch, Routes


@dataclass(frozen=True)
class Pack:
    """A microbatch, and the samples that its sequences come from.

    Attributes:
        microbatch: Padded sequences, concatenated.
        sample_indices: Index of each sequence's sample in ``build_microbatches``; empty for a dummy.
        lengths: Number of tokens of each sequence, without padding.
    """

    microbatch: Microbatch
    sample_indices: tuple[int, ...]
    lengths: tuple[int, ...]


def assign_to_ranks(lengths: Sequence[int], dp_size: int) -> list[list[int]]:
    """Balances tokens over data-parallel ranks: the longest remaining sample goes to the rank with the fewest tokens (LPT, Graham 1969).

    Args:
        lengths: Number of tokens of each sample. The result depends on nothing else, so every rank computes the same.
        dp_size: Number of data-parallel ranks.

    Returns:
        For each rank, the indices of its samples in ascending order; each index exactly once.
    """
    ranks: list[list[int]] = [[] for _ in range(dp_size)]
    # Equally loaded ranks are told apart by their number of samples: samples without tokens spread too.
    heap = [(0, 0, rank) for rank in range(dp_size)]
    for index in _longest_first(lengths):
        tokens, count, rank = heap[0]
        ranks[rank].append(index)
        heapq.heapreplace(heap, (tokens + lengths[index], count + 1, rank))
    return [sorted(indices) for indices in ranks]


def pack(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Packs samples under a token cap by first-fit-decreasing (at most 11/9 of the fewest packs, plus one), in O(n log n).

    Args:
        lengths: Number of tokens of each sample, padding included.
        max_tokens: Cap of a pack; a longer sample forms a pack of its own.

    Returns:
        The indices of each pack in ascending order; each index exactly once.
    """
    order = _longest_first(lengths)
    alone = [[index] for index in order if lengths[index] > max_tokens]
    # A tree over packs, those not begun yet included: each node knows the most free tokens of a pack below it.
    # Any two packs have more than the cap together.
    most = min(len(order) - len(alone), 2 * sum(lengths[index] for index in order[len(alone) :]) // max_tokens + 1)
    leaves = 1 << max(most - 1, 0).bit_length()
    free, packs = [max_tokens] * (2 * leaves), defaultdict[int, list[int]](list)
    for index in order[len(alone) :]:
        node, length = 1, lengths[index]
        while node < leaves:
            node = 2 * node if free[2 * node] >= length else 2 * node + 1
        packs[node].append(index)
        free[node] -= length
        while (node := node // 2) and free[node] != (most_below := max(free[2 * node], free[2 * node + 1])):
            free[node] = most_below
    return alone + [sorted(indices) for indices in packs.values()]


def _longest_first(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)  # of equal ones the first stays first


def sequence_multiple(tp_size: int, cp_size: int) -> int:
    """Number of tokens that every sequence's padded length must be a multiple of.

    Context parallelism cuts each sequence into 2 x cp_size pieces; sequence parallelism (on when tp_size > 1) cuts each piece into tp_size.
    """
    return tp_size * (2 * cp_size if cp_size > 1 else 1)


def build_microbatches(
    token_ids: Sequence[Tensor],
    loss_mask: Sequence[Tensor],
    rollout_logprobs: Sequence[Tensor],
    *,
    max_tokens: int,
    pad_multiple: int = 1,
    kept: Sequence[KeptTokens] = (),
    routes: Sequence[Routes] = (),
) -> list[Pack]:
    """Packs this rank's samples. Advantages are 0 until ``with_advantages``.

    Padding has token id 0 and mask 0 and belongs to its sequence; the first token of every sequence is masked.

    Args:
        token_ids: [L_i] integers for each sample.
        loss_mask: [L_i] float32 or bool for each sample, 1 on tokens that the policy sampled.
        rollout_logprobs: [L_i] float32 nats for each sample.
        max_tokens: ``train.max_tokens_per_gpu`` x cp_size, padding included.
        pad_multiple: See ``sequence_multiple``.
        kept: Vocabularies from which each sample's tokens were chosen; empty: the whole vocabulary.
        routes: Experts of each sample's tokens in this rank's layers; empty: the routers choose, as they do for padding.

    Returns:
        The packs; none if there are no samples.
    """
    padded = [-(-len(tokens) // pad_multiple) * pad_multiple for tokens in token_ids]

    def build(indices: list[int]) -> Pack:
        columns = ([values[i] for i in indices] for values in (token_ids, loss_mask, rollout_logprobs))
        return build_pack(
            indices,
            *columns,
            pad_multiple=pad_multiple,
            kept=[kept[i] for i in indices] if kept else (),
            routes=[routes[i] for i in indices] if routes else (),
        )

    return [build(indices) for indices in pack(padded, max_tokens)]


def build_pack(
    indices: Sequence[int],
    token_ids: Sequence[Tensor],
    loss_mask: Sequence[Tensor],
    rollout_logprobs: Sequence[Tensor],
    lags: Sequence[Tensor] = (),
    *,
    pad_multiple: int = 1,
    truncated: Sequence[bool] = (),
    kept: Sequence[KeptTokens] = (),
    routes: Sequence[Routes] = (),
) -> Pack:
    """Builds one pack from samples that ``pack`` grouped.

    Args:
        indices: Indices of the samples, for ``Pack.sample_indices``.
        token_ids: Token ids of these samples, as in ``build_microbatches``.
        loss_mask: Loss masks of these samples, as in ``build_microbatches``.
        rollout_logprobs: Engine's log-probs of these samples, as in ``build_microbatches``.
        lags: [L_i] ages of each sample's tokens, policy versions; empty: none is old.
        pad_multiple: See ``sequence_multiple``.
        truncated: Whether each response was cut at the length limit; empty: none was.
        kept: Vocabularies of these samples' tokens, as in ``build_microbatches``.
        routes: Experts of these samples' tokens, as in ``build_microbatches``.
    """
    lengths = [len(tokens) for tokens in token_ids]
    missing = [-length % pad_multiple for length in lengths]

    def flat(values: Sequence[Tensor]) -> Tensor:
        before = (0,) * (2 * values[0].dim() - 1)
        return torch.cat([pad(each, (*before, more)) if more else each for each, more in zip(values, missing, strict=True)])

    sizes = [length + more for length, more in zip(lengths, missing, strict=True)]
    cut = truncated or [False] * len(sizes)
    microbatch = _microbatch(flat(token_ids).long(), sizes, flat(loss_mask), flat(rollout_logprobs), cut)
    if kept:
        microbatch.kept = KeptTokens(torch.cat([of_sample.ids for of_sample in kept]), flat([of_sample.counts for of_sample in kept]))
    ages = flat(lags).masked_fill(microbatch.loss_mask == 0, 0) if lags else None
    if ages is not None and ages.any():
        microbatch.lags = ages.long()
    if routes:
        microbatch.routes = Routes(flat([each.experts for each in routes]), flat([each.known for each in routes]))
    return Pack(microbatch, tuple(indices), tuple(lengths))


def _microbatch(
    token_ids: Tensor, sizes: Sequence[int], loss_mask: Tensor, rollout_logprobs: Tensor, truncated: Sequence[bool]
) -> Microbatch:
    spans = torch.tensor(sizes, device=token_ids.device)
    cu_seqlens = pad(spans.cumsum(0), (1, 0))
    mask = (loss_mask > 0).float()
    mask[cu_seqlens[:-1]] = 0.0
    sequence = torch.arange(len(sizes), device=token_ids.device).repeat_interleave(spans)
    unmasked = mask.new_zeros(len(sizes)).index_add(0, sequence, mask)
    return Microbatch(
        token_ids=token_ids,
        cu_seqlens=cu_seqlens.int(),
        loss_mask=mask,
        advantages=_zeros_like(mask),  # until they are known
        rollout_logprobs=rollout_logprobs.float().masked_fill(mask == 0, 0.0),
        sequence_ids=sequence,
        sampled_tokens=unmasked,
        truncated=torch.tensor(truncated, dtype=torch.bool, device=token_ids.device),
        lags=_zeros_like(token_ids),
    )


def _zeros_like(values: Tensor) -> Tensor:
    """Zeros in the shape of ``values`` that take no memory and must not be written into."""
    return values.new_zeros(()).expand(values.shape)


def pad_with_dummies(packs: Sequence[Pack], count: int, pad_multiple: int = 1) -> list[Pack]:
    """Appends dummy packs until there are ``count``, the largest number on any data-parallel rank.

    A dummy is one fully masked sequence. It runs forward and backward like any pack, so that collectives match, and adds 0 to the loss and
    to its denominator.

    Raises:
        ValueError: there are more packs than ``count``.
    """
    if len(packs) > count:
        raise ValueError(f"{len(packs)} packs on this rank, but {count} agreed over data-parallel ranks")
    return [*packs, *(_dummy(max(2, pad_multiple)) for _ in range(count - len(packs)))]


def _dummy(tokens: int) -> Pack:
    token_ids, zeros = torch.zeros(tokens, dtype=torch.int64), torch.zeros(tokens)
    return Pack(_microbatch(token_ids, [tokens], zeros, zeros, [False]), (), ())


def with_advantages(packs: Sequence[Pack], advantages: Sequence[Tensor]) -> list[Pack]:
    """The packs with their advantages filled in.

    Args:
        packs: Packs of ``build_microbatches``; dummies are left alone.
        advantages: [R_i] float32 for each sample, of its last R_i tokens (R_i = L_i: of all); ignored where masked.
    """
    filled = spread_over_packs(packs, advantages)
    return [replace(item, microbatch=replace(item.microbatch, advantages=values)) for item, values in zip(packs, filled, strict=True)]


def spread_over_packs(packs: Sequence[Pack], values: Sequence[Tensor]) -> list[Tensor]:
    """Arranges per-token values of samples as per-token values of packs.

    Args:
        packs: Packs of ``build_microbatches``, with or without dummies.
        values: [R_i] float32 for each sample, of its last R_i tokens.

    Returns:
        [T] float32 for each pack, 0 where masked.
    """

    def fill(item: Pack) -> Tensor:
        flat = torch.zeros_like(item.microbatch.loss_mask)
        starts = item.microbatch.cu_seqlens.tolist()
        for start, length, index in zip(starts, item.lengths, item.sample_indices, strict=False):
            end = start + length
            flat[end - len(values[index]) : end] = values[index]
        return flat.masked_fill(item.microbatch.loss_mask == 0, 0.0)

    return [fill(item) for item in packs]


def split_by_sample(packs: Sequence[Pack], values: Sequence[Tensor]) -> list[Tensor]:
    """Cuts per-token results of packs back into samples.

    Args:
        packs: Packs of ``build_microbatches``, with or without dummies.
        values: [T] for each pack, any dtype.

    Returns:
        [L_i] for each sample, in the order of ``build_microbatches``; views without the padding.
    """
    by_sample: dict[int, Tensor] = {}
    for item, flat in zip(packs, values, strict=True):
        starts = item.microbatch.cu_seqlens.tolist()
        for start, length, index in zip(starts, item.lengths, item.sample_indices, strict=False):
            by_sample[index] = flat[start : start + length]
    return [by_sample[index] for index in sorted(by_sample)]
