"""Vocabulary-parallel, chunked log-probs against log_softmax over whole logits."""

from __future__ import annotations

import pytest
import torch

from tests.megatron.logprobs import TOKENS, by_chunks, by_columns, plain


@pytest.mark.parametrize("ranks", [1, 2])
def test_values_entropy_and_gradients(ranks: int, rank_pool) -> None:
    """In float64, log-prob, entropy and the gradients of both agree with log_softmax, on one rank and over unequal column counts of two."""
    for results in rank_pool(ranks).run(by_columns):
        for ours, theirs in zip(results, plain(torch.float64), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("chunk_tokens", [1, 5, TOKENS, 1000])
def test_any_chunk_size(ranks: int, chunk_tokens: int, rank_pool) -> None:
    """The same in float32 for chunks of one token to more than all; padded columns take no probability and no gradient."""
    for results in rank_pool(ranks).run(by_chunks, chunk_tokens):
        for ours, theirs in zip(results, plain(torch.float32), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-5)
