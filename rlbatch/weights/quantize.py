"""Block-quantised weights: e4m3 values in blocks of 128 x 128, each with a float32 scale, as DeepSeek-V3's checkpoints hold them.

``weight = value * scale_inv`` and ``scale_inv = block maximum / 448`` (DeepSeek-V3, inference/kernel.py, ``weight_quant`` and
``weight_dequant``; despite its name the stored scale is what a value is multiplied by). A matrix [M, N] has scales [ceil(M / 128),
ceil(N / 128)]; blocks at the edges are partial.

torch converts to and from e4m3 one value at a time on the CPU. Here both ways are integer operations on whole rows, in strips that stay
in the cache, with bitwise the same results.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from rlbatch.api import DataError

BLOCK = 128
"""Rows and columns of a block."""
LARGEST = 448.0
"""Largest e4m3 value."""
SCALE_SUFFIX = "_scale_inv"
"""A weight's scales have its name with this behind it."""
SCALE_LIMIT = 2.0**119
"""Scales are below it: 2^8 times a scale is finite."""

_STRIP = 2**17
"""Elements of a strip: 512 KiB as float32."""
_HALF_BIAS = 2.0**8


def scales_shape(rows: int, columns: int) -> tuple[int, int]:
    """Blocks of a matrix."""
    return -(-rows // BLOCK), -(-columns // BLOCK)


def check_scales(scale_inv: Tensor, name: str) -> None:
    """Refuses scales that no weight can have.

    Args:
        scale_inv: float32.
        name: What they belong to: file and tensor.

    Raises:
        DataError: one is not finite, not positive, or too large.
    """
    bad = ~((scale_inv > 0) & (scale_inv < SCALE_LIMIT))
    if bad.any():
        place = bad.nonzero()[0].tolist()
        raise DataError(
            f"{name}: scales must be positive, finite and below 2^119, at block {place} is {scale_inv[bad][0].item()} "
            f"({int(bad.sum())} of {bad.numel()} are not). Download the file again, or quantise the weights anew."
        )


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantises a matrix by blocks, rounding to the nearest, ties to even.

    From bf16 it is stable: quantising what ``dequantize`` gives returns the same values and scales.

    Args:
        weight: [M, N] bfloat16 or float32, on any device.

    Returns:
        [M, N] float8_e4m3fn, and [ceil(M / 128), ceil(N / 128)] float32: each block's maximum / 448, or 1 for a block that is 0. The scale
        of a block with infinite values or NaN is that too (``check_scales`` refuses it).
    """
    rows, columns = weight.shape
    values = torch.empty(rows, columns, dtype=torch.float8_e4m3fn, device=weight.device)
    scales = torch.empty(scales_shape(rows, columns), dtype=torch.float32, device=weight.device)
    scratch = _Scratch(columns)
    for block, start in enumerate(range(0, rows, BLOCK)):
        row, into = weight[start : start + BLOCK], values[start : start + BLOCK]
        scales[block] = _row_of_scales(row)
        divisor = _by_column(scales[block], columns)
        if weight.device.type == "cpu" and bool(scales[block].isfinite().all()):
            for strip in scratch.strips(row.shape[0]):
                scratch.to_e4m3(row[strip], divisor, into[strip])
        else:
            into.copy_(row.float() / divisor)
    return values, scales


def dequantize(weight: Tensor, scale_inv: Tensor, dtype: torch.dtype = torch.bfloat16, first: tuple[int, int] = (0, 0)) -> Tensor:
    """Multiplies values with their block's scale in float32, and rounds once.

    Args:
        weight: [M, N] float8_e4m3fn, on any device.
        scale_inv: float32 scales of the blocks that it touches, on the same device.
        dtype: Of the result.
        first: Row and column of ``weight[0, 0]`` within its block, for a part that begins inside one.

    Returns:
        [M, N] ``dtype``.
    """
    rows, columns = weight.shape
    result = torch.empty(rows, columns, dtype=dtype, device=weight.device)
    scratch = _Scratch(columns)
    start = 0
    for block in range(scale_inv.shape[0]):
        stop = min(rows, (block + 1) * BLOCK - first[0])
        factor = _by_column(scale_inv[block], columns, first[1])
        row, into = weight[start:stop], result[start:stop]
        if weight.device.type == "cpu":
            shifted = factor * _HALF_BIAS
            for strip in scratch.strips(stop - start):
                if not scratch.from_e4m3(row[strip], shifted, into[strip]):
                    into[strip].copy_(row[strip].float().mul_(factor))
        else:
            into.copy_(row.float().mul_(factor))
        start = stop
    return result


def _by_column(scales: Tensor, columns: int, first: int = 0) -> Tensor:
    """A row of blocks' scales, one for each column."""
    return scales.repeat_interleave(BLOCK)[first : first + columns]


def _row_of_scales(row: Tensor) -> Tensor:
    """Scales of a row of blocks, [at most 128, N] -> [ceil(N / 128)]."""
    # Without their sign, floating-point numbers are ordered as their bits are; NaN is above infinity.
    bits, sign = (row.view(torch.int16), -0x8000) if row.element_size() == 2 else (row.view(torch.int32), -0x80000000)
    largest = (bits & ~sign).amax(0).view(row.dtype).float()
    padded = F.pad(largest, (0, -len(largest) % BLOCK))
    # By a tensor: CUDA divides by a number as by its rounded reciprocal.
    scales: Tensor = padded.unflatten(0, (-1, BLOCK)).amax(1) / torch.tensor(LARGEST, device=row.device)
    return scales.where(scales != 0, 1.0)


class _Scratch:
    """Conversion of strips of a matrix on the CPU, in buffers that stay in the cache.

    A float16 with the exponent and mantissa of an e4m3 value is 2^8 times smaller than it: their biases are 15 and 7.
    """

    def __init__(self, columns: int) -> None:
        self._height = max(1, _STRIP // columns)
        self._columns = columns
        self._tensors: dict[torch.dtype, Tensor] = {}

    def strips(self, rows: int) -> Iterator[slice]:
        """Ranges of rows."""
        return (slice(start, min(rows, start + self._height)) for start in range(0, rows, self._height))

    def _get(self, dtype: torch.dtype, rows: int) -> Tensor:
        if dtype not in self._tensors:
            self._tensors[dtype] = torch.empty(self._height, self._columns, dtype=dtype)
        return self._tensors[dtype][:rows]

    def from_e4m3(self, values: Tensor, shifted: Tensor, into: Tensor) -> bool:
        """``into = values * shifted / 2^8``, each product rounded once; False and nothing, if there is a NaN."""
        rows = len(values)
        doubled = self._get(torch.uint8, rows)
        torch.add(values.view(torch.uint8), values.view(torch.uint8), out=doubled)
        if doubled.amax() == 254:
            return False
        half, wide = self._get(torch.int16, rows), self._get(torch.float32, rows)
        half.copy_(values.view(torch.int8))  # bits 7 and 8 are the sign, below are exponent and mantissa
        half.bitwise_left_shift_(7).bitwise_and_(-0x4001)  # the lower sign goes
        wide.copy_(half.view(torch.float16))
        into.copy_(wide.mul_(shifted))
        return True

    def to_e4m3(self, values: Tensor, divisor: Tensor, into: Tensor) -> None:
        """``into = values / divisor``, rounded to the nearest, ties to even; quotients are in [-448, 448]."""
        rows = len(values)
        quotients, magic = self._get(torch.float32, rows), self._get(torch.int32, rows).view(torch.float32)
        half, signs = self._get(torch.int16, rows), self._get(torch.float16, rows)
        torch.div(values, divisor, out=quotients) if values.dtype == torch.float32 else quotients.copy_(values).div_(divisor)
        signs.copy_(quotients)
        # The largest power of two up to the value, but at least 2^-6, e4m3's smallest normal. Adding 1.5 x 2^20 times it leaves three bits
        # of mantissa, or below 2^-6 steps of 2^-9: float32's own rounding is then the one to e4m3.
        torch.abs(quotients, out=magic).clamp_(min=2.0**-6).view(torch.int32).bitwise_and_(0x7F800000)
        quotients.add_(magic.mul_(1.5 * 2.0**20)).sub_(magic).mul_(1 / _HALF_BIAS)
        half.view(torch.float16).copy_(quotients)  # exact
        half.bitwise_right_shift_(7).bitwise_and_(0x7F)
        half.bitwise_or_(signs.view(torch.int16).bitwise_right_shift_(8).bitwise_and_(-0x80))  # a negative 0 stays one
        into.view(torch.int8).copy_(half)
