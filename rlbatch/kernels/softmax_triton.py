"""The softmax of ``rlbatch.kernels.softmax`` in two kernels for GPUs: one pass over the logits for the values, one for the gradient.

torch's operations write and read several float32 matrices of the logits' size in the place of one bf16 matrix.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 8192
"""Columns that a program takes at a time."""
LOWEST = tl.constexpr(-3e38)


@triton.jit
def _statistics(logits, targets, peaks, totals, weighted, chosen, columns, stride, inverse_temperature, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    base = logits + row * stride
    peak = tl.full((), LOWEST, tl.float32)
    total = tl.full((), 0.0, tl.float32)
    weight = tl.full((), 0.0, tl.float32)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        is_there = column < columns
        values = tl.load(base + column, mask=is_there, other=0.0).to(tl.float32) * inverse_temperature
        higher = tl.maximum(peak, tl.max(tl.where(is_there, values, LOWEST), 0))
        shifted = tl.where(is_there, values - higher, 0.0)
        exponents = tl.where(is_there, tl.exp(shifted), 0.0)
        # What was summed relative to the old peak: e^(x - old) (x - old) = e^(x - new) (x - new + new - old) e^(new - old).
        rise = tl.where(total > 0, peak - higher, 0.0)
        scale = tl.exp(rise)
        weight = (weight + total * rise) * scale + tl.sum(exponents * shifted, 0)
        total = total * scale + tl.sum(exponents, 0)
        peak = higher
    target = tl.load(targets + row)
    is_here = (target >= 0) & (target < columns)
    value = tl.load(base + tl.where(is_here, target, 0)).to(tl.float32) * inverse_temperature
    tl.store(peaks + row, peak)
    tl.store(totals + row, total)
    tl.store(weighted + row, weight)
    tl.store(chosen + row, tl.where(is_here, value - peak, 0.0))


@triton.jit
def _gradient(
    logits, targets, log_totals, entropies, grad_logprobs, grad_entropies, columns, stride, inverse_temperature, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_there = column < columns
    base = logits + row * stride
    log_probs = tl.load(base + column, mask=is_there, other=0.0).to(tl.float32) * inverse_temperature - tl.load(log_totals + row)
    of_target = tl.load(grad_logprobs + row) * inverse_temperature
    of_entropy = tl.load(grad_entropies + row) * inverse_temperature
    slope = -tl.exp(log_probs) * (of_target + of_entropy * (log_probs + tl.load(entropies + row)))
    slope += tl.where(column == tl.load(targets + row), of_target, 0.0)
    tl.store(base + column, slope.to(logits.dtype.element_ty), mask=is_there)


def statistics(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See ``softmax.statistics``."""
    rows, columns = logits.shape
    results = [torch.empty(rows, dtype=torch.float32, device=logits.device) for _ in range(4)]
    _statistics[(rows,)](logits, targets, *results, columns, logits.stride(0), 1 / temperature, BLOCK=BLOCK, num_warps=16)
    return results[0], results[1], results[2], results[3]


def gradient(logits: Tensor, targets: Tensor, temperature: float, state: tuple[Tensor, Tensor], upstream: tuple[Tensor, Tensor]) -> Tensor:
    """See ``softmax.gradient``."""
    rows, columns = logits.shape
    grid = rows, triton.cdiv(columns, BLOCK)
    values = [values.contiguous() for values in (*state, *upstream)]
    _gradient[grid](logits, targets, *values, columns, logits.stride(0), 1 / temperature, BLOCK=BLOCK, num_warps=8)
    return logits
