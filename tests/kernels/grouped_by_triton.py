"""Run by an interpreter that has Triton, with ``TRITON_INTERPRET=1``: weight gradients beside a loop over experts, as JSON."""

from __future__ import annotations

import json

import torch

from rlbatch.kernels import grouped_triton

grouped_triton.ROWS, grouped_triton.COLUMNS, grouped_triton.DEPTH = 16, 32, 16
torch.manual_seed(0)
COUNTS = [0, 5, 33, 0, 16, 1, 0]  # experts without tokens, runs of less and of more than a tile
ends = torch.tensor(COUNTS).cumsum(0).to(torch.int32)
slopes, inputs = torch.randn(sum(COUNTS), 40), torch.randn(sum(COUNTS), 72)  # no multiples of a tile
total = torch.randn(len(COUNTS), 40, 72)
want = torch.stack([one + left.T @ right for one, left, right in zip(total, slopes.split(COUNTS), inputs.split(COUNTS), strict=True)])
grouped_triton.add_weight_gradients(total, slopes, inputs, ends)
print(json.dumps({"gradients": float((total - want).abs().max())}))
