"""Vocabulary-parallel, chunked log-probs against log_softmax over whole logits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlbatch.config.schema import LayoutConfig
from tests import tiny_models
from tests.megatron.logprobs import TOKENS, bf16_errors, bf16_gradients, by_chunks, kept_tokens, plain


@pytest.mark.parametrize("ranks", [1, 2])
def test_values_entropy_and_gradients(ranks: int, rank_pool) -> None:
    """In float64, log-prob, entropy and the gradients of both agree with log_softmax, on one rank and over unequal column counts of two."""
    for results in rank_pool(ranks).run(by_chunks, 5, None, torch.float64):
        for ours, theirs in zip(results, plain(torch.float64), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("chunk_tokens", [1, 5, TOKENS, 1000])
def test_any_chunk_size(ranks: int, chunk_tokens: int, rank_pool) -> None:
    """The same in float32 for chunks of one token to more than all; padded columns take no probability and no gradient."""
    for results in rank_pool(ranks).run(by_chunks, chunk_tokens):
        for ours, theirs in zip(results, plain(torch.float32), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("chunk_tokens", [1, 5, 1000])
def test_tokens_that_were_chosen_from_some_alone(ranks: int, chunk_tokens: int, rank_pool) -> None:
    """Log-prob, entropy and gradients are of the distribution over the kept tokens, also where a rank has none of them in its columns."""
    for results in rank_pool(ranks).run(by_chunks, chunk_tokens, kept_tokens()):
        for ours, theirs in zip(results, plain(torch.float32, is_truncated=True), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_chunk_is_not_in_the_bf16_gradient(ranks: int, rank_pool) -> None:
    """In bf16 the output layer's gradient is rounded once: chunks of one token are as near to float64's as one chunk of all tokens."""
    for whole, single in rank_pool(ranks).run(bf16_errors, (1000, 1)):
        assert single == pytest.approx(whole, rel=0.05)
        assert max(whole) < 4e-3


@pytest.mark.parametrize("layout", [LayoutConfig(world_size=1), LayoutConfig(world_size=2, tp_size=2)], ids=["1 rank", "tp2"])
@pytest.mark.parametrize("tied", [False, True])
def test_the_chunk_is_not_in_a_models_bf16_gradient(tied: bool, layout: LayoutConfig, rank_pool, tmp_path: Path) -> None:
    """The same for a model's output layer, also where it is the embedding, over tensor-parallel ranks."""
    folder = tiny_models.saved(tiny_models.qwen2(tie_word_embeddings=tied), tmp_path / "model")
    name = "model.embed_tokens.weight" if tied else "lm_head.weight"
    whole, single = (
        rank_pool(layout.world_size).run(bf16_gradients, str(folder), layout, chunk_tokens)[0][name].double() for chunk_tokens in (1000, 1)
    )
    assert float((single - whole).norm() / whole.norm()) < 1e-3
