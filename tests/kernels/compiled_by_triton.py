"""Run by an interpreter that has Triton: compiles every kernel without a GPU; the experts' one's shared memory by architecture, as JSON."""

from __future__ import annotations

import json

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from rlbatch.kernels import grouped_triton, softmax_triton

VALUES, TILES = ("columns", "stride", "inverse_temperature"), ("ROWS", "COLUMNS", "DEPTH")
KERNELS = {
    "statistics": (softmax_triton._statistics, {"BLOCK": softmax_triton.BLOCK}, {"num_warps": 16}),
    "gradient": (softmax_triton._gradient, {"BLOCK": softmax_triton.BLOCK}, {"num_warps": 8}),
    "add": (grouped_triton._add, {name: getattr(grouped_triton, name) for name in TILES}, {"num_warps": 8, "num_stages": 3}),
}
TYPES = {
    "logits": "*bf16",
    "slopes": "*bf16",
    "inputs": "*bf16",
    "targets": "*i64",
    "ends": "*i32",
    "rows": "i32",
    "columns": "i32",
    "stride": "i32",
    "inverse_temperature": "fp32",
}


def compiled(name: str, architecture: int) -> int:
    """Bytes of shared memory."""
    kernel, constants, options = KERNELS[name]
    signature = {argument: "constexpr" if argument in constants else TYPES.get(argument, "*fp32") for argument in kernel.arg_names}
    places = {(kernel.arg_names.index(argument),): value for argument, value in constants.items()}
    aligned = {(place,): [["tt.divisibility", 16]] for place, kind in enumerate(signature.values()) if kind not in ("constexpr", "fp32")}
    source = ASTSource(fn=kernel, signature=signature, constexprs=places, attrs=aligned)
    return int(triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options).metadata.shared)


print(json.dumps({architecture: [compiled(name, architecture) for name in KERNELS][-1] for architecture in (89, 90)}))
