"""Values that are infinite or NaN are counted, in every type that weights have."""

from __future__ import annotations

import pytest
import torch

from rlbatch.api import DataError
from rlbatch.checkpoint.finite import check_finite, count_not_finite


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_every_value_of_a_type(dtype: torch.dtype) -> None:
    """As torch sees it: all bit patterns of the small types, the extremes of the others."""
    if dtype.itemsize <= 2:
        integer = torch.int8 if dtype.itemsize == 1 else torch.int16
        values = torch.arange(torch.iinfo(integer).min, torch.iinfo(integer).max + 1).to(integer).view(dtype)
    else:
        limits = torch.finfo(dtype)
        values = torch.tensor([0.0, -0.0, limits.max, limits.min, limits.smallest_normal, torch.inf, -torch.inf, torch.nan], dtype=dtype)
    wanted = int((~values.float().isfinite()).sum()) if dtype != torch.float64 else 3
    assert count_not_finite(values) == wanted > 0
    assert count_not_finite(values[:0]) == 0
    assert count_not_finite(torch.zeros(3, 3, dtype=dtype)) == 0


def test_integers_are_finite() -> None:
    """Whatever their bits."""
    assert count_not_finite(torch.tensor([-1, 0x7F800000])) == 0


def test_refused() -> None:
    """With the place and the number."""
    check_finite(torch.ones(4), "file: weight")
    with pytest.raises(DataError, match=r"^file: weight: 2 of 4 values are infinite or NaN\. Download the file again; "):
        check_finite(torch.tensor([[1.0, torch.nan], [-torch.inf, 0.0]]), "file: weight")
