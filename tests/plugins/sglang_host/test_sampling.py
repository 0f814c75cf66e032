"""Which tokens stay under top_k and top_p in SGLang, against a plain count."""

from __future__ import annotations

import random

import pytest
import torch

from rlbatch_plugins.sglang_host.sampling import draw_among, likeliest


def plainly(probs: list[float], top_k: int, top_p: float) -> set[int]:
    """The likeliest tokens, one by one, until they have the share."""
    order = sorted(range(len(probs)), key=lambda token: -probs[token])[:top_k]
    whole, before, kept = sum(probs[token] for token in order), 0.0, set()
    for token in order:
        if kept and top_p < 1 and before >= top_p * whole:
            break
        kept.add(token)
        before += probs[token]
    return kept


@pytest.mark.parametrize("top_p", [1e-9, 0.1, 0.5, 0.77, 0.95, 1.0])
def test_the_likeliest_stay(top_p: float) -> None:
    """With their probabilities; all others have 0."""
    draw = random.Random(1)
    for _ in range(60):
        weights, top_k = [draw.randint(1, 20) for _ in range(draw.randint(1, 12))], draw.randint(1, 14)
        kept = likeliest(torch.tensor([weights]), torch.tensor([top_k]), torch.tensor([top_p], dtype=torch.float64))[0]
        expected = plainly([float(weight) for weight in weights], top_k, top_p)
        assert kept.nonzero().flatten().tolist() == sorted(expected)
        assert all(kept[token] == weights[token] for token in expected)


def test_requests_of_a_batch_have_their_own_limits() -> None:
    """SGLang's batches: each row draws among its own likeliest tokens, and one without limits among all."""
    probs = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).repeat(4000, 1)
    top_ks, top_ps = torch.full((4000,), 1 << 30), torch.ones(4000)
    top_ks[1::4], top_ps[2::4] = 2, 0.7
    tokens = draw_among(probs, top_ks, top_ps, torch.arange(4000) * 7919, torch.zeros(4000))
    assert set(tokens[1::4].tolist()) == set(tokens[2::4].tolist()) == {0, 1}
    assert set(tokens[0::4].tolist()) == {0, 1, 2, 3}
