"""Packed attention against loops over single tokens."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import varlen

from rlbatch.megatron import attention
from rlbatch.megatron.attention import zigzag_indices
from tests.megatron.attention import context_parallel, module, naive, tensors

ALONE = SimpleNamespace(size=lambda: 1, rank=lambda: 0)


def kernel_of(query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, scale: float) -> Tensor:
    """What torch's kernel computes, refusing what it refuses."""
    assert query.shape[-1] == key.shape[-1] == value.shape[-1]
    assert query.shape[-1] % 8 == 0
    return attention._padded(query, key, value, cu_seqlens.tolist(), scale)


def older(query: Tensor, key: Tensor, value: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, is_causal: bool = False) -> Tensor:
    """As in torch 2.10."""
    assert is_causal
    assert query.shape[1] == key.shape[1]
    return kernel_of(query, key, value, cu_q, query.shape[-1] ** -0.5)


def newer(query: Tensor, key: Tensor, value: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, **options: Any) -> Tensor:
    """As in torch 2.13."""
    assert options["window_size"] == (-1, 0)
    assert options["enable_gqa"]
    return kernel_of(query, key, value, cu_q, options["scale"])


newer.__signature__ = inspect.signature(  # type: ignore[attr-defined]
    lambda query, key, value, cu_q, cu_k, max_q, max_k, *, scale=None, window_size=(-1, -1), enable_gqa=False: None
)


@pytest.mark.parametrize("bounds", [[0, 7], [0, 3, 4, 9, 21], [0, 1, 2]])
def test_ragged_packs(bounds: list[int]) -> None:
    """No token sees another sequence, padding or the future; grouped heads, a value dimension of its own; outputs and gradients."""
    query, key, value, grad = tensors(bounds[-1])
    output = module(ALONE)(query, key, value, None, packed_seq_params=SimpleNamespace(cu_seqlens_q=torch.tensor(bounds)))
    expected = naive(query, key, value, bounds)
    torch.testing.assert_close(output, expected)
    inputs = [query, key, value]
    for ours, theirs in zip(torch.autograd.grad(output, inputs, grad), torch.autograd.grad(expected, inputs, grad), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_batches_of_equal_sequences() -> None:
    """[s, b, h, d] is a pack of b sequences."""
    sequences, length = 3, 5
    query, key, value, _ = tensors(sequences * length)
    expected = naive(query, key, value, [0, 5, 10, 15]).view(sequences, length, -1).transpose(0, 1)
    batched = [tensor.view(sequences, length, *tensor.shape[1:]).transpose(0, 1) for tensor in (query, key, value)]
    torch.testing.assert_close(module(ALONE)(*batched, None), expected)


@pytest.mark.parametrize("cp_size", [2, 3, 4])
def test_zigzag_covers_every_token_once(cp_size: int) -> None:
    """Over all ranks each position of the pack occurs exactly once, as many on every rank, ascending within a sequence."""
    bounds = [0, 2 * cp_size, 8 * cp_size, 12 * cp_size]
    parts = [zigzag_indices(bounds, cp_size, rank) for rank in range(cp_size)]
    assert [len(part) for part in parts] == [bounds[-1] // cp_size] * cp_size
    assert sorted(torch.cat(parts).tolist()) == list(range(bounds[-1]))
    assert all(part.tolist() == sorted(part.tolist()) for part in parts)


def test_zigzag_shares_the_work_equally() -> None:
    """Under a causal mask every rank scores as many pairs of tokens: the reason for chunks r and 2 x CP - 1 - r."""
    work = [int((zigzag_indices([0, 24], 3, rank) + 1).sum()) for rank in range(3)]
    assert len(set(work)) == 1


def test_context_parallel(rank_pool) -> None:
    """Two ranks with halves of every sequence compute the outputs and gradients of one."""
    bounds = [0, 4, 16, 24]
    query, key, value, grad = tensors(bounds[-1])
    expected = naive(query, key, value, bounds)
    gradients = torch.autograd.grad(expected, [query, key, value], grad)
    for whole in rank_pool(2).run(context_parallel, bounds):
        for ours, theirs in zip(whole, (expected, *gradients), strict=True):
            torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("kernel", [older, newer])
@pytest.mark.parametrize("value_dim", [2, 5, 11])
def test_flash_attention_of_one_width(value_dim: int, kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU's kernel gets queries, keys and values of one head dimension that it takes, whichever is wider, under either signature of
    torch; outputs and gradients are those of unequal widths, and the scale is the layer's.
    """
    monkeypatch.setattr(varlen, "varlen_attn", kernel)
    bounds = [0, 3, 4, 9]
    query, key, _, _ = tensors(bounds[-1])
    generator = torch.Generator().manual_seed(8)
    value = torch.randn(bounds[-1], key.shape[1], value_dim, generator=generator, dtype=key.dtype, requires_grad=True)
    inputs = (query, key, value)
    ours, theirs = attention._varlen(*inputs, bounds, 0.3), attention._padded(*inputs, bounds, 0.3)
    torch.testing.assert_close(ours, theirs)
    grad = torch.randn(theirs.shape, generator=generator, dtype=key.dtype)
    for mine, other in zip(torch.autograd.grad(ours, inputs, grad), torch.autograd.grad(theirs, inputs, grad), strict=True):
        torch.testing.assert_close(mine, other)
