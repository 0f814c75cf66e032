"""Makes one loss an update of one loss a token, the same for any split over ranks, microbatches and packs.

``loss = sum over all tokens of the update (per-token loss x weight) / denominator``

Weights are local to a token. The denominator is one number for the whole update: the sum of ``denominator`` over its microbatches and
data-parallel ranks. Policy loss, KL and entropy share both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlbatch.api import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

AGGREGATIONS = ("token_mean", "sequence_mean", "sequence_sum", "sequence_sum_norm")


def loss_weights(loss_mask: Tensor, sequence_ids: Tensor, sampled_tokens: Tensor, aggregation: str) -> Tensor:
    """Weight of each token's loss.

    Args:
        loss_mask: [T] float32, of a microbatch or of any slice of it.
        sequence_ids: [T] int64, the token's sequence.
        sampled_tokens: [N] float32, unmasked tokens of each whole sequence.
        aggregation: ``token_mean``, ``sequence_sum``, ``sequence_sum_norm``: every unmasked token weighs 1. ``sequence_mean``: every
            sequence weighs 1, shared by its tokens.

    Returns:
        [T] float32; 0 where masked.

    Raises:
        ConfigError: an unknown aggregation.
    """
    if aggregation in ("token_mean", "sequence_sum", "sequence_sum_norm"):
        return loss_mask
    if aggregation == "sequence_mean":
        return loss_mask / sampled_tokens.clamp(min=1.0)[sequence_ids]
    raise _unknown(aggregation)


def denominator(loss_mask: Tensor, cu_seqlens: Tensor, aggregation: str, norm_constant: float = 1.0) -> float:
    """What a microbatch adds to the update's denominator: unmasked tokens, or sequences with at least one unmasked token.

    Of ``sequence_sum_norm`` it is these sequences times a constant, so the loss is their mean of a sum divided by it. A fully masked
    sequence counts for nothing. Count whole sequences: before context parallelism slices them, and once for each data-parallel rank.

    Args:
        loss_mask: [T] float32.
        cu_seqlens: [N+1] integers, where each sequence starts; the last entry is T.
        aggregation: One of ``AGGREGATIONS``.
        norm_constant: ``algorithm.loss_norm_constant``, for ``sequence_sum_norm``.

    Returns:
        0 for a dummy.

    Raises:
        ConfigError: an unknown aggregation.
    """
    unmasked = loss_mask > 0
    before = unmasked.new_zeros(len(unmasked) + 1, dtype=cu_seqlens.dtype)
    before[1:] = unmasked.cumsum(0)
    return denominator_of(before[cu_seqlens].diff(), aggregation, norm_constant)


def denominator_of(lengths: Tensor, aggregation: str, norm_constant: float = 1.0) -> float:
    """The same as ``denominator``, given how many unmasked tokens each whole sequence has.

    Args:
        lengths: [N] integers.
        aggregation: The same as for ``denominator``.
        norm_constant: The same as for ``denominator``.

    Raises:
        ConfigError: an unknown aggregation.
    """
    if aggregation == "token_mean":
        return float(lengths.sum())
    if aggregation in AGGREGATIONS:
        sequences = float((lengths > 0).sum())
        return sequences * norm_constant if aggregation == "sequence_sum_norm" else sequences
    raise _unknown(aggregation)


def _unknown(aggregation: str) -> ConfigError:
    return ConfigError(
        f"algorithm.loss_aggregation={aggregation}: no such aggregation. Use {', '.join(AGGREGATIONS[:-1])} or {AGGREGATIONS[-1]}."
    )
