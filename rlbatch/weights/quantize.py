"""Block-quantised weights: e4m3 values in blocks of 128 x 128, each with a float32 scale, as DeepSeek-V3's checkpoints hold them.

``weight = value * scale_inv`` and ``scale_inv = block maximum / 448`` (DeepSeek-V3, inference/kernel.py, ``weight_quant`` and
``weight_dequant``; despite its name the stored scale is what a value is multiplied by). A matrix [M, N] has scales [ceil(M / 128),
ceil(N / 128)]; blocks at the edges are partial.

torch converts from e4m3 one value at a time on the CPU. Here that is integer operations on whole rows, with bitwise the same results; both
ways work on strips that stay in the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.nn.functional as F
from torch import Tensor

from rlbatch.api import DataError

BLOCK = 128
"""Rows and columns of a block."""
LARGEST = 448.0
"""Largest e4m3 value."""
SCALE_SUFFIX = "_scale_inv"
"""Suffix of a weight's name in the name of its scales."""
SCALE_LIMIT = 2.0**119
"""Upper limit of scales, below which 2^8 times a scale is finite in float32."""

_HALF_BIAS = 2.0**8
"""A float16 with the exponent and mantissa of an e4m3 value is that much smaller than it: their biases are 15 and 7."""
_STRIP = 2**17
"""Elements that a thread converts at once: 512 KiB as float32 stay in its cache."""
_SMALL = 2**20
"""Elements from which on several threads are worth it."""
_MOST_THREADS = 8
"""Most threads of a conversion: Python is between their operations."""
_AT_ONCE = 2**24
"""Elements that a GPU converts at once: 64 MiB as float32."""


def scales_shape(rows: int, columns: int) -> tuple[int, int]:
    """Shape of a matrix's scales: its numbers of blocks, by rows and columns."""
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

    def convert(block: int, scratch: _Scratch) -> None:
        row, into = (tensor[block * BLOCK : (block + 1) * BLOCK] for tensor in (weight, values))
        scales[block] = _row_of_scales(row)
        divisor = _by_column(scales[block], columns)
        if bool(scales[block].isfinite().all()):
            scratch.to_e4m3(row, divisor, into)
        else:
            into.copy_(row.float() / divisor)

    if weight.device.type == "cpu":
        _for_each_block_row(convert, scales.shape[0], values)
    else:
        quantize_at_once(weight, values, scales)
    return values, scales


def quantize_at_once(weight: Tensor, values: Tensor, scales: Tensor) -> None:
    """Quantises into ``values`` and ``scales``, many blocks an operation: for devices where each operation has to be launched.

    At most three times ``_AT_ONCE`` float32 elements exist at once, or those of one row of blocks.
    """
    columns = weight.shape[1]
    step = max(1, _AT_ONCE // (BLOCK * max(1, columns)))
    # By a tensor: CUDA divides by a number as by its rounded reciprocal.
    largest_value = torch.tensor(LARGEST, device=weight.device)
    for first in range(0, len(scales), step):
        of_rows, into = (tensor[first * BLOCK : (first + step) * BLOCK] for tensor in (weight, values))
        padded = F.pad(of_rows.float(), (0, -columns % BLOCK, 0, -len(of_rows) % BLOCK))
        blocks = padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
        # Not of the absolute values: a block is not copied once more. NaN stays NaN.
        highest, lowest = blocks.amax((1, 3)), blocks.amin((1, 3))
        found = torch.maximum(highest, -lowest) / largest_value
        scales[first : first + step] = found.where(found != 0, 1.0)
        quotients = blocks / scales[first : first + step, None, :, None]
        into.copy_(quotients.flatten(2, 3).flatten(0, 1)[: len(of_rows), :columns])


def dequantize(weight: Tensor, scale_inv: Tensor, dtype: torch.dtype = torch.bfloat16, first: tuple[int, int] = (0, 0)) -> Tensor:
    """Multiplies values with their block's scale in float32, and rounds once.

    Args:
        weight: [M, N] float8_e4m3fn, on any device.
        scale_inv: float32 scales of the blocks that it touches, on the same device.
        dtype: Dtype of the result.
        first: Row and column of ``weight[0, 0]`` within its block, for a part that begins inside one.

    Returns:
        [M, N] ``dtype``.
    """
    rows, columns = weight.shape
    result = torch.empty(rows, columns, dtype=dtype, device=weight.device)

    def convert(block: int, scratch: _Scratch) -> None:
        start, stop = (min(max(0, edge * BLOCK - first[0]), rows) for edge in (block, block + 1))
        row, into = weight[start:stop], result[start:stop]
        factor = _by_column(scale_inv[block], columns, first[1])
        if weight.device.type != "cpu" or not scratch.from_e4m3(row, factor * _HALF_BIAS, into):
            into.copy_(row.float().mul_(factor))

    _for_each_block_row(convert, scale_inv.shape[0], result)
    return result


def _for_each_block_row(convert: Callable[[int, _Scratch], None], blocks: int, matrix: Tensor) -> None:
    """Calls ``convert``, in several threads if torch may use them and it is worth it.

    Not with torch's own, which wait for each other after every operation, spinning: where cores are shared, they wait most of the time.
    """
    threads, columns = torch.get_num_threads(), matrix.shape[1]
    count = min(threads, blocks, _MOST_THREADS) if matrix.numel() >= _SMALL and matrix.device.type == "cpu" else 1

    def convert_some(first: int) -> None:
        scratch = _Scratch(columns)
        for block in range(first, blocks, count):
            convert(block, scratch)

    if count == 1:
        convert_some(0)
        return
    try:
        with ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            list(pool.map(convert_some, range(count)))
    finally:
        torch.set_num_threads(threads)  # what later threads begin with


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
    """Conversion of a row of blocks on the CPU, strip by strip, in buffers that stay in the cache."""

    def __init__(self, columns: int) -> None:
        self._height = max(1, min(BLOCK, _STRIP // columns))
        shape = (self._height, columns)
        self._bytes = torch.empty(shape, dtype=torch.uint8)
        self._half = torch.empty(shape, dtype=torch.float16)
        self._wide = torch.empty(shape, dtype=torch.float32)

    def from_e4m3(self, row: Tensor, shifted: Tensor, into: Tensor) -> bool:
        """``into = row * shifted / 2^8``, each product rounded once; False, and ``into`` is undefined, if there is a NaN."""
        has_nan = False
        height = self._height
        bits = row.view(torch.int8)
        for values, unsigned, target in zip(bits.split(height), bits.view(torch.uint8).split(height), into.split(height), strict=True):
            doubled, half, wide = (buffer[: len(values)] for buffer in (self._bytes, self._half, self._wide))
            torch.add(unsigned, unsigned, out=doubled)
            has_nan |= doubled.amax().item() == 254
            # Bits 7 and 8 of the int16 are the sign, below are exponent and mantissa; then the lower sign goes.
            half.view(torch.int16).copy_(values).bitwise_left_shift_(7).bitwise_and_(-0x4001)
            target.copy_(wide.copy_(half).mul_(shifted))
        return not has_nan

    def to_e4m3(self, row: Tensor, divisor: Tensor, into: Tensor) -> None:
        """``into = row / divisor``, rounded to the nearest, ties to even; quotients are in [-448, 448]."""
        for values, target in zip(row.split(self._height), into.split(self._height), strict=True):
            target.copy_(self._wide[: len(values)].copy_(values).div_(divisor))
