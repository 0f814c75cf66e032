"""Run by an interpreter that has Triton, with ``TRITON_INTERPRET=1``: the kernels beside torch's operations, as JSON on the last line."""

from __future__ import annotations

import itertools
import json

import torch

from rlbatch.kernels import softmax, softmax_triton

torch.manual_seed(0)
softmax_triton.BLOCK = 64  # several blocks a row, the last one not full
PADDING = -1e30
TARGETS = torch.tensor([0, 299, 150, -7, 304, 63, 64])  # also of other ranks
ERRORS = {}
for dtype, temperature in itertools.product((torch.float32, torch.bfloat16), (1.0, 0.6)):
    logits = (torch.randn(len(TARGETS), 304) * 5).to(dtype)
    logits[:, 300:] = PADDING * min(temperature, 1.0)
    logits[3] = PADDING * min(temperature, 1.0)  # none of this rank's tokens could be chosen
    logits[5, 100] = 80.0  # a maximum that comes late, as large as can be
    names = "peak", "total", "weighted", "chosen"
    ours, theirs = (module.statistics(logits, TARGETS, temperature) for module in (softmax_triton, softmax))
    case = f"{dtype} {temperature}"
    for name, one, other in zip(names, ours, theirs, strict=True):
        ERRORS[f"{case} {name}"] = float(((one - other).abs() / (1 + other.abs())).max())
    state = tuple(softmax.log_softmax(logits.where(logits[:, :1] > -1e29, 0.0), TARGETS, temperature, None, softmax)[1:])[::-1]
    upstream = torch.randn(len(TARGETS)), torch.randn(len(TARGETS))
    want = softmax.gradient(logits.clone(), TARGETS, temperature, state, upstream)
    got = softmax_triton.gradient(logits.clone(), TARGETS, temperature, state, upstream)
    ERRORS[f"{case} gradient"] = float((got.float() - want.float()).norm() / want.float().norm())
    ERRORS[f"{case} padding"] = float(got[:, 300:].abs().max())
print(json.dumps(ERRORS))
