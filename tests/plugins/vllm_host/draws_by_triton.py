"""Run by an interpreter that has Triton: with ``TRITON_INTERPRET=1`` the kernel beside torch, else compiles it; JSON on the last line."""

from __future__ import annotations

import json
import os

import torch

from rlbatch.engines.protocol.counter_rng import numbers
from rlbatch_plugins.vllm_host import seeded_draws, seeded_draws_triton

ROWS, COLUMNS = 40, 9000  # three blocks, the last one not full


def compared() -> dict[str, int]:
    logits = 4 * torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0))
    logits[:, 5:5000] = -torch.inf
    seeds, positions = torch.arange(ROWS) * 7919, torch.arange(ROWS)
    tokens = seeded_draws_triton.first_tokens(logits, numbers(seeds, positions))
    return {"rows": ROWS, "same": int((tokens == seeded_draws.draw(logits, seeds, positions)).sum())}


def compiled() -> dict[str, list[int]]:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kinds = {"logits": "*fp32", "keys": "*i64", "scores": "*fp32", "places": "*i64", "BLOCK": "constexpr"}
    kernel = seeded_draws_triton._first
    signature = {name: kinds.get(name, "i32") for name in kernel.arg_names}
    block = {(kernel.arg_names.index("BLOCK"),): seeded_draws_triton.BLOCK}
    done = []
    for architecture in (80, 90):
        source = ASTSource(fn=kernel, signature=signature, constexprs=block)
        triton.compile(source, target=GPUTarget("cuda", architecture, 32), options={"num_warps": 8})
        done.append(architecture)
    return {"compiled": done}


print(json.dumps(compared() if os.environ["TRITON_INTERPRET"] == "1" else compiled()))
