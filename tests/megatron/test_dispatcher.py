"""The sum over ranks of what their experts computed; whole models under ``layout.dispatcher=gather``: ``test_gradients.py``."""

from __future__ import annotations

import pytest
import torch

from tests.megatron.sums import ROWS, of_rank, summed


@pytest.mark.parametrize("ranks", [2, 4])
def test_sums_are_rounded_once(ranks: int, rank_pool) -> None:
    """Those of fp32, rounded to bf16; every rank's gradients come from the rank whose tokens they are, as they are."""
    exact = sum(of_rank(rank, ranks).float() for rank in range(ranks)).bfloat16().split(ROWS)
    slopes = torch.arange(1, ranks + 1).repeat_interleave(ROWS).bfloat16()[:, None].expand(-1, 8)
    for rank, (total, gradients) in enumerate(rank_pool(ranks).run(summed)):
        assert torch.equal(total, exact[rank])
        assert torch.equal(gradients, slopes)
