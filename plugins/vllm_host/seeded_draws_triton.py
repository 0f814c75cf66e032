"""``seeded_draws`` in one kernel for GPUs."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlbatch.engines.protocol import counter_rng

BLOCK = 4096
"""Columns of a program."""
STEP, FIRST, SECOND = (tl.constexpr(value % 2**64) for value in (counter_rng.STEP, counter_rng.FIRST, counter_rng.SECOND))


@triton.jit
def _first(logits, keys, scores, places, columns, stride, blocks, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_there = column < columns
    mixed = tl.load(keys + row).to(tl.uint64, bitcast=True) + (column + 1).to(tl.uint64) * STEP
    mixed = (mixed ^ (mixed >> 30)) * FIRST
    mixed = (mixed ^ (mixed >> 27)) * SECOND
    mixed = mixed ^ (mixed >> 31)
    high, low = (mixed >> 32).to(tl.uint32).to(tl.float32), mixed.to(tl.uint32).to(tl.float32)
    share = high * 2.3283064365386963e-10 + low * 5.421010862427522e-20
    short = share * (1 + share * (0.5 + share * (0.3333333333333333 + share * 0.25)))  # -log(1 - share), where that loses digits
    time = tl.where(share < 0.015625, short, -tl.log(tl.maximum(1 - share, 2.9802322387695312e-8)))
    values = tl.load(logits + row * stride + column, mask=is_there, other=float("-inf")).to(tl.float32)
    score = values - tl.log(tl.maximum(time, 1e-20))
    tl.store(scores + row * blocks + tl.program_id(1), tl.max(score, 0))
    tl.store(places + row * blocks + tl.program_id(1), tl.program_id(1) * BLOCK + tl.argmax(score, 0))


def first_tokens(logits: Tensor, keys: Tensor) -> Tensor:
    """[B, V] logits and [B] int64 keys -> [B] int64 tokens."""
    rows, columns = logits.shape
    blocks = triton.cdiv(columns, BLOCK)
    scores = torch.empty(rows, blocks, dtype=torch.float32, device=logits.device)
    places = torch.empty(rows, blocks, dtype=torch.int64, device=logits.device)
    launch: Any = _first[rows, blocks]
    launch(logits, keys, scores, places, columns, logits.stride(0), blocks, BLOCK=BLOCK, num_warps=8)
    return places.gather(-1, scores.argmax(-1, keepdim=True)).squeeze(-1)
