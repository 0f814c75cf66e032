"""Run by an interpreter that has Triton, with ``TRITON_INTERPRET=1``: SwiGLU and its gradients beside torch's in float64, as JSON."""

from __future__ import annotations

import json

import torch
import torch.nn.functional as F

from rlbatch.kernels import swiglu_triton

swiglu_triton.ROWS, swiglu_triton.COLUMNS = 4, 16
torch.manual_seed(0)


def computed(gate_up: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up * weights.unsqueeze(-1)


ERRORS = {}
for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
    values, weights, slopes = (torch.randn(11, 2 * 40) * 3).to(dtype), torch.rand(11), torch.randn(11, 40).to(dtype)  # no whole tiles
    got, want = [], []
    for found, inputs, function in (
        (got, (values.clone(), weights.clone()), swiglu_triton.weighted_swiglu),
        (want, (values.double(), weights.double()), computed),
    ):
        for one in inputs:
            one.requires_grad_()
        outputs = function(*inputs)
        outputs.backward(slopes.to(outputs.dtype))
        found += [outputs.detach(), *(one.grad for one in inputs)]
    for what, one, other in zip(("output", "gate and up", "weights"), got, want, strict=True):
        ERRORS[f"{name} {what}"] = float((one.double() - other).norm() / other.norm())
print(json.dumps(ERRORS))
