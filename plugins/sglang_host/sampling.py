"""Tokens drawn with numbers that depend on nothing but a sample's seed and the place of the token in it."""

from __future__ import annotations

import torch
from torch import Tensor

from rlbatch.engines.protocol.counter_rng import numbers, shift_right


def uniforms(seeds: Tensor, positions: Tensor) -> Tensor:
    """[B] float64 in [0, 1) from [B] int64 seeds and positions: splitmix64's ``positions``-th number after each seed."""
    return shift_right(numbers(seeds, positions.long()), 11).double() * 2.0**-53


def draw_tokens(probs: Tensor, sampling_seed: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
    """[B, V] probabilities -> [B] int32 tokens, by inversion of the cumulative distribution.

    In the place of SGLang's ``sampling_from_probs_torch``. Its own seeded draw, which needs ``enable_deterministic_inference``, takes a
    random token of the vocabulary, however unlikely, whenever one of its V 32-bit numbers is the largest one (with V = 150,000 once in
    29,000 tokens).
    """
    if sampling_seed is None or positions is None:
        return torch.multinomial(probs, num_samples=1).view(-1).to(torch.int32)
    cumulative = probs.cumsum(-1, dtype=torch.float64)
    wanted = uniforms(sampling_seed, positions) * cumulative[:, -1]
    tokens = torch.searchsorted(cumulative, wanted.unsqueeze(-1), right=True)
    return tokens.clamp(max=probs.shape[-1] - 1).view(-1).to(torch.int32)


def draw_among(probs: Tensor, top_ks: Tensor, top_ps: Tensor, sampling_seed: Tensor | None, positions: Tensor | None) -> Tensor:
    """Draws as ``draw_tokens`` among the likeliest; the most likely token where ``top_ks`` ([B]) is 1, as of a request with temperature 0.

    In the place of SGLang's ``top_k_top_p_min_p_sampling_from_probs_torch``, which a batch goes on asking for when its last greedy request
    is over, and whose seeded draw has the same fault.
    """
    is_limited = (top_ks < probs.shape[-1]) | (top_ps < 1)  # the others draw as they do without such requests beside them
    tokens = draw_tokens(torch.where(is_limited[:, None], likeliest(probs, top_ks, top_ps), probs.double()), sampling_seed, positions)
    return torch.where(top_ks == 1, probs.argmax(-1).to(torch.int32), tokens)


def likeliest(probs: Tensor, top_ks: Tensor, top_ps: Tensor) -> Tensor:
    """[B, V] float64 probabilities, 0 where a token is left out; what is left does not sum to 1.

    The likeliest token always stays. Of equally likely ones the first stay.

    Args:
        probs: [B, V].
        top_ks: [B] how many stay; V or more: all.
        top_ps: [B] the smallest share of ``top_ks``' probability that must stay; 1: all.
    """
    ordered, tokens = probs.double().sort(dim=-1, descending=True, stable=True)
    places = torch.arange(probs.shape[-1], device=probs.device)
    ordered = ordered.where(places < top_ks[:, None], 0.0)
    before = ordered.cumsum(-1) - ordered
    is_left_out = (before >= top_ps[:, None] * ordered.sum(-1, keepdim=True)) & (top_ps[:, None] < 1) & (places > 0)
    return torch.zeros_like(ordered).scatter_(-1, tokens, ordered.masked_fill(is_left_out, 0.0))
