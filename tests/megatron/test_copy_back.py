"""Weights on their way from the host, in pieces of two buffers; here to other memory of the host (on a GPU: ``tests/gpu/offload.py``)."""

from __future__ import annotations

import pytest
import torch

from rlbatch.megatron.copy_back import CopyBack


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("length", [0, 1, 15, 16, 17, 100])
def test_every_value_arrives(dtype: torch.dtype, length: int) -> None:
    """Rounded as torch rounds, whatever the length; nothing beside it is touched. Buffers have room for 16 values of 4 bytes."""
    copies = CopyBack(torch.zeros(128, dtype=torch.uint8), None)
    for offset in (0.0, 1000.0):
        source = torch.linspace(-1, 1, length) + offset
        memory = torch.full((length + 2,), 7.0, dtype=dtype)
        copies.copy(memory[1 : length + 1], source)
        assert torch.equal(memory[1 : length + 1], source.to(dtype))
        assert memory[[0, -1]].tolist() == [7.0, 7.0]
        back = torch.full((length + 2,), 7.0)
        copies.fetch(back[1 : length + 1], memory[1 : length + 1])
        assert torch.equal(back[1 : length + 1], source.to(dtype).float())
        assert back[[0, -1]].tolist() == [7.0, 7.0]
