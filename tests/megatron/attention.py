"""Attention over a pack by naive loops, and by one context-parallel rank."""

from __future__ import annotations

import math
from itertools import pairwise
from types import SimpleNamespace

import torch
import torch.distributed as dist

from rlbatch.megatron.attention import PackedAttention, zigzag_indices

HEADS, KV_HEADS, KEY_DIM, VALUE_DIM = 4, 2, 6, 5


def tensors(tokens: int) -> list[torch.Tensor]:
    """Query, key, value and the gradient of the output, float64."""
    generator = torch.Generator().manual_seed(7)
    shapes = ((HEADS, KEY_DIM), (KV_HEADS, KEY_DIM), (KV_HEADS, VALUE_DIM), (HEADS * VALUE_DIM,))
    made = [torch.randn(tokens, *shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [tensor.requires_grad_() for tensor in made[:3]] + made[3:]


def module(group: object) -> PackedAttention:
    return PackedAttention(SimpleNamespace(kv_channels=KEY_DIM), 1, None, "self", pg_collection=SimpleNamespace(tp=None, cp=group))


def naive(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bounds: list[int]) -> torch.Tensor:
    """Softmax token by token: each sees itself and what is before it in its sequence."""
    rows = []
    for start, end in pairwise(bounds):
        for position in range(start, end):
            heads = []
            for head in range(HEADS):
                shared = head // (HEADS // KV_HEADS)
                scores = key[start : position + 1, shared] @ query[position, head] / math.sqrt(KEY_DIM)
                heads.append(scores.softmax(0) @ value[start : position + 1, shared])
            rows.append(torch.cat(heads))
    return torch.stack(rows)


def context_parallel(bounds: list[int]) -> list[torch.Tensor]:
    """Output and gradients of the whole pack, put together from all ranks' halves."""
    size, rank = dist.get_world_size(), dist.get_rank()
    mine = zigzag_indices(bounds, size, rank)
    query, key, value, grad = tensors(bounds[-1])
    local = [tensor.detach()[mine].requires_grad_() for tensor in (query, key, value)]
    packed = SimpleNamespace(cu_seqlens_q=torch.tensor(bounds))
    output = module(dist.group.WORLD)(*local, None, packed_seq_params=packed)
    output.backward(grad[mine])
    whole = []
    for part in (output.detach(), *(tensor.grad for tensor in local)):
        full = part.new_zeros(bounds[-1], *part.shape[1:])
        full[mine] = part
        dist.all_reduce(full)
        whole.append(full)
    return whole
