"""What ``test_dispatcher.py`` computes on every rank."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from rlbatch.megatron.dispatcher import _SumOfRanks

ROWS = 40


def of_rank(rank: int, ranks: int) -> Tensor:
    """[ranks x ROWS, 8] bf16 values of widely different sizes."""
    drawn = torch.randn(ranks * ROWS, 8, generator=torch.Generator().manual_seed(rank))
    return (drawn * 10 ** torch.linspace(-3, 3, 8)).bfloat16()


def summed() -> tuple[Tensor, Tensor]:
    """This rank's sums, and gradients of what it gave to all: those of each rank's sums are its number plus one."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    values = of_rank(rank, ranks).requires_grad_()
    total = _SumOfRanks.apply(values, dist.group.WORLD)
    total.backward(torch.full_like(total, rank + 1))
    return total.detach(), values.grad
