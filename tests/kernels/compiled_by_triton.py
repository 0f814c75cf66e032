"""Run by an interpreter that has Triton: compiles every kernel without a GPU.

Prints as JSON, by architecture, of the experts' one: bytes of shared memory, and of each thread's memory for what has no register.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from rlbatch.kernels import grouped_triton, softmax_triton, swiglu_triton

VALUES, TILES = ("columns", "stride", "inverse_temperature"), ("ROWS", "COLUMNS", "DEPTH")
KERNELS = {
    "statistics": (softmax_triton._statistics, {"BLOCK": softmax_triton.BLOCK}, {"num_warps": 16}),
    "gradient": (softmax_triton._gradient, {"BLOCK": softmax_triton.BLOCK}, {"num_warps": 8}),
    "forward": (swiglu_triton._forward, {name: getattr(swiglu_triton, name) for name in TILES[:2]}, {"num_warps": 4}),
    "backward": (swiglu_triton._backward, {name: getattr(swiglu_triton, name) for name in TILES[:2]}, {"num_warps": 4}),
    "add": (
        grouped_triton._add,
        {name: getattr(grouped_triton, name) for name in TILES} | {"rows": 1536, "columns": 2048},
        {"num_warps": 8, "num_stages": 3},
    ),
}
TYPES = {
    "logits": "*bf16",
    **dict.fromkeys(("slopes", "inputs", "gate_up", "grad_gate_up", "outputs"), "*bf16"),
    "targets": "*i64",
    "ends": "*i32",
    **dict.fromkeys(("columns", "stride", "tokens", "width"), "i32"),
    "inverse_temperature": "fp32",
}


def compiled(name: str, architecture: int) -> tuple[int, int]:
    """Bytes of shared memory, and of a thread's stack."""
    kernel, constants, options = KERNELS[name]
    signature = {argument: "constexpr" if argument in constants else TYPES.get(argument, "*fp32") for argument in kernel.arg_names}
    places = {(kernel.arg_names.index(argument),): value for argument, value in constants.items()}
    aligned = {(place,): [["tt.divisibility", 16]] for place, kind in enumerate(signature.values()) if kind not in ("constexpr", "fp32")}
    source = ASTSource(fn=kernel, signature=signature, constexprs=places, attrs=aligned)
    made = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        said = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True).stdout
    return int(made.metadata.shared), int(re.search(r"STACK:(\d+)", said).group(1))


print(json.dumps({architecture: [compiled(name, architecture) for name in KERNELS][-1] for architecture in (89, 90)}))
