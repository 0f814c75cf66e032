"""Changes the last digits of weights, to measure what rounding does to a model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

DIGITS = {torch.float32: 23, torch.bfloat16: 7}
"""Binary digits after the point in a type."""


@contextlib.contextmanager
def rounded(tensors: Iterable[Tensor], digits: int) -> Iterator[None]:
    """Context in which about every second value of the tensors differs in the last of ``digits`` binary digits; all are restored after it.

    The change follows from a value's own leading digits, so copies of a parameter on other ranks stay equal, and nothing is stored.
    """
    own = {tensor.data_ptr(): tensor for tensor in tensors if tensor.dtype in DIGITS and tensor.numel()}
    for tensor in own.values():
        _change(tensor, DIGITS[tensor.dtype] - digits)
    try:
        yield
    finally:
        for tensor in own.values():
            _change(tensor, DIGITS[tensor.dtype] - digits)


@torch.no_grad()
def _change(tensor: Tensor, place: int) -> None:
    """Flips one binary digit, counted from the last, in the values whose leading digits say so. A second call restores the values."""
    kind, turn, shift = (torch.int32, 0x3779B97F, 19) if tensor.itemsize == 4 else (torch.int16, 0x5E37, 9)
    bits = tensor.detach().view(kind)
    bits ^= (((bits >> (place + 1)) * turn >> shift) & 1) << place
