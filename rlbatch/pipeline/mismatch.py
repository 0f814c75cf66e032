"""Measures where log-probs of engine and trainer differ: by the token's place in its response, and by the kind of token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from rlbatch.api import Microbatch
from rlbatch.megatron import parallel

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

KINDS = ("first", "last", "digits", "repeated")
"""Kinds of tokens: first and last of a response; those with a digit in their text; those that equal one of the ``NEAR`` tokens before."""
NEAR = 8
SPANS = 32
"""Number of spans of places: span n has places 2**n to 2**(n + 1) - 1 of a response, counted from 1."""


def compared_tokens(microbatch: Microbatch) -> Tensor:
    """[T] float32: 1 for tokens whose log-probs of engine and trainer are of the same policy version, else 0."""
    return microbatch.loss_mask if microbatch.lags is None else microbatch.loss_mask.where(microbatch.lags == 0, 0.0)


def profile(microbatches: Sequence[Microbatch], digits: Tensor) -> dict[str, float]:
    """Mean absolute log-prob differences by kind and span, over the samples of all ranks; a collective.

    Args:
        microbatches: Microbatches of this rank, with the trainer's log-probs as old log-probs.
        digits: [vocabulary] bool, whether a token has a digit.

    Returns:
        ``mismatch/diff_*`` tags for the kinds and spans that occur, nats.
    """
    sums = sums_of(microbatches, digits)
    dist.all_reduce(sums, group=parallel.dp_group())
    return means(sums)


def sums_of(microbatches: Sequence[Microbatch], digits: Tensor) -> Tensor:
    """[2, spans and kinds] float64: sums of absolute differences, and numbers of tokens."""
    sums = torch.zeros(2, SPANS + len(KINDS), dtype=torch.float64)
    for microbatch in microbatches:
        assert microbatch.old_logprobs is not None
        weights = compared_tokens(microbatch).double()
        difference = (microbatch.old_logprobs - microbatch.rollout_logprobs).abs().double() * weights
        from_start, from_end = _places(microbatch)
        kinds = torch.stack([from_start == 1, from_end == 1, digits[microbatch.token_ids], _repeated(microbatch)])
        spans = from_start.clamp(min=1).double().log2().floor().long().clamp(max=SPANS - 1)
        for row, values in enumerate((difference, weights)):
            sums[row, :SPANS].scatter_add_(0, spans, values)
            sums[row, SPANS:] += (kinds * values).sum(1)
    return sums


def means(sums: Tensor) -> dict[str, float]:
    """``mismatch/diff_*`` tags from the sums of ``sums_of``, nats."""
    names = [f"at_{2**span}" for span in range(SPANS)] + list(KINDS)
    total, count = sums.tolist()
    return {f"mismatch/diff_{name}": total[place] / count[place] for place, name in enumerate(names) if count[place]}


def _places(microbatch: Microbatch) -> tuple[Tensor, Tensor]:
    """Two [T] int64: each token's place in its response counted from the start and from the end, from 1; 0 or less outside of it."""
    sampled = microbatch.loss_mask > 0
    index, own = torch.arange(len(sampled)), microbatch.sequence_ids
    sequences = len(microbatch.cu_seqlens) - 1
    first = torch.full((sequences,), len(sampled)).scatter_reduce(0, own[sampled], index[sampled], "amin")
    last = torch.full((sequences,), -1).scatter_reduce(0, own[sampled], index[sampled], "amax")
    return index - first[own] + 1, last[own] - index + 1


def _repeated(microbatch: Microbatch) -> Tensor:
    """[T] bool, whether a token equals one of the ``NEAR`` tokens before it in its sequence."""
    tokens, own = microbatch.token_ids, microbatch.sequence_ids
    repeated = torch.zeros_like(tokens, dtype=torch.bool)
    for back in range(1, min(NEAR, len(tokens) - 1) + 1):
        repeated[back:] |= (tokens[back:] == tokens[:-back]) & (own[back:] == own[:-back])
    return repeated


def digit_tokens(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> Tensor:
    """[vocab_size] bool, whether a token has a digit in its text."""
    texts = tokenizer.convert_ids_to_tokens(list(range(min(len(tokenizer), vocab_size))))
    found = [any(letter.isdigit() for letter in text or "") for text in texts]
    return torch.tensor(found + [False] * (vocab_size - len(found)))
