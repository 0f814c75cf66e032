"""Weights that differ in their last place."""

from __future__ import annotations

import pytest
import torch

from rlbatch.megatron.rounding import rounded


@pytest.mark.parametrize(("dtype", "digits"), [(torch.float32, 23), (torch.float32, 7), (torch.bfloat16, 7), (torch.bfloat16, 4)])
def test_half_the_values_change_by_one_place(dtype: torch.dtype, digits: int) -> None:
    """And no more; those that are equal do the same wherever they are, tensors that share memory change once, and all is undone."""
    tensor = torch.randn(50, 100, generator=torch.Generator().manual_seed(1)).to(dtype)
    before, half = tensor.clone(), tensor.clone()[:, 50:].contiguous()
    with rounded([tensor, tensor.view(-1), half, torch.arange(4)], digits):
        off = ((tensor.double() - before.double()) / before.double()).abs()
        assert 0.4 < float((off > 0).float().mean()) < 0.6
        assert 0.5 * 2.0**-digits < float(off.max()) <= 2.0**-digits
        assert half.equal(tensor[:, 50:])
    assert tensor.equal(before)
