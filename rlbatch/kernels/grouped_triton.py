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
def _add(total, slopes, inputs, ends, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr):
    tiles_down, tiles_across = tl.cdiv(rows, ROWS), tl.cdiv(columns, COLUMNS)
    tile = tl.program_id(0) % (tiles_down * tiles_across)
    expert = tl.program_id(0) // (tiles_down * tiles_across)
    first = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    last = tl.load(ends + expert)
    row = tile % tiles_down * ROWS + tl.arange(0, ROWS)
    column = tile // tiles_down * COLUMNS + tl.arange(0, COLUMNS)
    is_row, is_column = row < rows, column < columns
    product = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(first, last, DEPTH):
        token = start + tl.arange(0, DEPTH).to(tl.int64)
        is_token = (token < last)[:, None]
        left = tl.load(slopes + token[:, None] * rows + row[None, :], mask=is_token & is_row[None, :], other=0.0)
        right = tl.load(inputs + token[:, None] * columns + column[None, :], mask=is_token & is_column[None, :], other=0.0)
        product = tl.dot(tl.trans(left), right, product)
    place = total + expert.to(tl.int64) * rows * columns + row[:, None] * columns + column[None, :]
    is_there = is_row[:, None] & is_column[None, :]
    tl.store(place, tl.load(place, mask=is_there, other=0.0) + product, mask=is_there)


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
