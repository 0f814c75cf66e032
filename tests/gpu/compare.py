"""The local spec's gradients on GPUs against the CPU's: run on a GPU machine with `python -m tests.gpu.compare`; `make test` has no GPU.

Prints one line a model, layout and precision: the largest relative L2 error of any parameter's gradient, and of all parameters together,
against one fp32 CPU process. Exits with 1 if a bound is exceeded. Arguments: names of models (all).
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from tests import tiny_models
from tests.gpu.layouts import LAYOUTS

BOUNDS = {"fp32": 1e-4, "bf16": 0.2}
"""On all parameters together. bf16 keeps 8 bits, rounds the weights and at every layer, and sends some tokens to other experts."""


MODELS: dict[str, Callable[[], torch.nn.Module]] = {  # expert rows that grouped GEMM takes
    "qwen3_moe": partial(tiny_models.qwen3_moe, moe_intermediate_size=32),
    "deepseek_v3": partial(tiny_models.deepseek_v3, moe_intermediate_size=32),
    "moonlight": partial(tiny_models.moonlight, moe_intermediate_size=32),
    "mixtral": tiny_models.mixtral,
    "qwen2": tiny_models.qwen2,
}
DENSE = ("qwen2",)


def main() -> int:
    """Compares every layout that this machine has GPUs for."""
    failures = 0
    for model in sys.argv[1:] or MODELS:
        with tempfile.TemporaryDirectory() as scratch:
            folder = tiny_models.saved(MODELS[model](), Path(scratch) / model)
            (want,) = _run(folder, "cpu", ["1 GPU"], ["fp32"]).values()
            for size in (size for size in (1, 2, 4) if size <= torch.cuda.device_count()):
                layouts = [n for n, x in LAYOUTS.items() if x.world_size == size and not (model in DENSE and x.ep_size * x.etp_size > 1)]
                for (name, precision), got in _run(folder, "gpu", layouts, list(BOUNDS)).items():
                    failures += not _report(f"{model} {name}", precision, got, want)
    return 1 if failures else 0


def _report(name: str, precision: str, got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> bool:
    """Prints a line and says whether the bound holds."""
    worst, where = max((float((got[n].float() - want[n]).norm() / want[n].norm()), n) for n in want)
    difference = torch.cat([(got[n].float() - want[n]).flatten() for n in want]).norm()
    joint = float(difference / torch.cat([tensor.flatten() for tensor in want.values()]).norm())
    verdict = "ok" if joint <= BOUNDS[precision] else "TOO LARGE"
    print(f"{name:<28} {precision}  all parameters {joint:.2e}  worst {worst:.2e} ({where})  loss {float(got['loss']):.6f}  {verdict}")
    return joint <= BOUNDS[precision]


def _run(folder: Path, device: str, names: list[str], precisions: list[str]) -> dict[tuple[str, str], dict[str, torch.Tensor]]:
    """Runs layouts of one world size in processes of their own and returns what rank 0 computed."""
    results = folder.parent / f"{device}_{LAYOUTS[names[0]].world_size}"
    results.mkdir()
    environment = os.environ | ({} if device == "gpu" else {"CUDA_VISIBLE_DEVICES": ""})
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={LAYOUTS[names[0]].world_size}", "--master-port=29611"]
    arguments = ["-m", "tests.gpu.rank", str(folder), str(results), ",".join(precisions), *names]
    subprocess.run([*command, *arguments], env=environment, check=True)
    return {(n, p): torch.load(results / f"{n}.{p}.pt", weights_only=True) for n in names for p in precisions}


if __name__ == "__main__":
    sys.exit(main())
