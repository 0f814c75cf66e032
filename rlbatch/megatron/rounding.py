"""Weights that differ in their last place: what rounding does to a model can then be measured."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

DIGITS = {torch.float32: 23, torch.bfloat16: 7}
"""Binary digits behind the point."""


@contextlib.contextmanager
def rounded(tensors: Iterable[Tensor], digits: int) -> Iterator[None]:
    """In the block about every second value of the tensors differs in the last of so many binary digits; after it all are as they were.

    It follows from a value's own digits before that one: copies of a parameter on other ranks stay equal, and nothing is kept.
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
    """Changes a binary digit, counted from the last one, in values of which those before it say so. Twice is not at all."""
    kind, turn, shift = (torch.int32, 0x3779B97F, 19) if tensor.itemsize == 4 else (torch.int16, 0x5E37, 9)
    bits = tensor.detach().view(kind)
    bits ^= (((bits >> (place + 1)) * turn >> shift) & 1) << place
