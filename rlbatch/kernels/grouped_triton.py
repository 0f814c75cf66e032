"""The weight gradients of all experts of a rank in one kernel, which adds them to float32 where they stay.

torch's grouped product makes them in bf16, to be read and added once more: a pass over all experts' gradients for each microbatch.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

ROWS, COLUMNS, DEPTH = 128, 256, 64
"""Tile of a gradient, and tokens at a time: the fastest of six on an H200."""


@triton.jit
def _add(
    total,
    slopes,
    inputs,
    ends,
    rows: tl.constexpr,
    columns: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    tiles_down: tl.constexpr = (rows + ROWS - 1) // ROWS
    tiles_across: tl.constexpr = (columns + COLUMNS - 1) // COLUMNS
    tile = tl.program_id(0) % (tiles_down * tiles_across)
    expert = tl.program_id(0) // (tiles_down * tiles_across)
    first = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    last = tl.load(ends + expert)
    row = tile % tiles_down * ROWS + tl.arange(0, ROWS)
    column = tile // tiles_down * COLUMNS + tl.arange(0, COLUMNS)
    token = first.to(tl.int64) + tl.arange(0, DEPTH)
    # Beyond the last row or column it reads others, whose products are not stored: the loop has no masks.
    left = slopes + token[:, None] * rows + (row % rows)[None, :]
    right = inputs + token[:, None] * columns + (column % columns)[None, :]
    product = tl.zeros((ROWS, COLUMNS), tl.float32)
    whole = (last - first) // DEPTH
    for _ in range(whole):
        product = tl.dot(tl.trans(tl.load(left)), tl.load(right), product)
        left += DEPTH * rows
        right += DEPTH * columns
    is_token = (first + whole * DEPTH + tl.arange(0, DEPTH) < last)[:, None]
    product = tl.dot(tl.trans(tl.load(left, mask=is_token, other=0.0)), tl.load(right, mask=is_token, other=0.0), product)
    place = total + expert.to(tl.int64) * rows * columns + row[:, None] * columns + column[None, :]
    # One addition to each number: in the memory's own units, since the tile and what is there do not both fit the registers.
    tl.atomic_add(place, product, mask=(row < rows)[:, None] & (column < columns)[None, :], sem="relaxed")


def add_weight_gradients(total: Tensor, slopes: Tensor, inputs: Tensor, ends: Tensor) -> None:
    """``total[e] += slopes_e.T @ inputs_e`` of each expert e's run of tokens.

    Args:
        total: [E, rows, columns] float32, contiguous.
        slopes: [T, rows] contiguous, sorted by expert.
        inputs: [T, columns] contiguous.
        ends: [E] int32, where each run ends.
    """
    experts, rows, columns = total.shape
    grid = (experts * triton.cdiv(rows, ROWS) * triton.cdiv(columns, COLUMNS),)
    _add[grid](total, slopes, inputs, ends, rows, columns, ROWS=ROWS, COLUMNS=COLUMNS, DEPTH=DEPTH, num_warps=8, num_stages=3)
