"""GPU gradients against the CPU's: run on a GPU machine with `python -m tests.gpu.compare` (not part of `make test`, which has no GPU).

Prints one line a layout and precision: the largest relative L2 error of any parameter's gradient, and of all parameters together, against one fp32
CPU process. Exits with 1 if a bound is exceeded.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from rlbatch.config.schema import LayoutConfig
from tests import tiny_models

FP32_BOUND = 1e-4
BF16_BOUND = 0.1
"""bf16 keeps 8 bits: forward and backward round at every layer. Measured: see docs/results.md."""
ONE = LayoutConfig(world_size=1)
LAYOUTS = {
    "1 GPU": ONE,
    "1 GPU, recompute": replace(ONE, recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1),
    "DP2": LayoutConfig(world_size=2),
    "EP2": LayoutConfig(world_size=2, ep_size=2),
    "PP2": LayoutConfig(world_size=2, pp_size=2),
    "TP2 ETP2": LayoutConfig(world_size=2, tp_size=2, etp_size=2),
    "TP2 EP2": LayoutConfig(world_size=2, tp_size=2, ep_size=2),
    "CP2": LayoutConfig(world_size=2, cp_size=2),
    "TP2 CP2 EP2": LayoutConfig(world_size=4, tp_size=2, cp_size=2, ep_size=2),
    "PP2 EP2": LayoutConfig(world_size=4, pp_size=2, ep_size=2),
}


def main() -> int:
    """Compares every layout that this machine has GPUs for."""
    gpus = torch.cuda.device_count()
    failures = 0
    with tempfile.TemporaryDirectory() as scratch:
        folder = tiny_models.saved(tiny_models.qwen3_moe(moe_intermediate_size=32), Path(scratch) / "model")
        want = _gradients(folder, "CPU", ONE, "fp32", gpu=False)
        for name, layout in LAYOUTS.items():
            if layout.world_size > gpus:
                continue
            for precision, bound in (("fp32", FP32_BOUND), ("bf16", BF16_BOUND)):
                got = _gradients(folder, name, layout, precision, gpu=True)
                worst, where = max((float((got[n].float() - want[n]).norm() / want[n].norm()), n) for n in want if n != "loss")
                joint = torch.cat([(got[n].float() - want[n]).flatten() for n in want]).norm() / torch.cat([w.flatten() for w in want.values()]).norm()
                verdict = "ok" if float(joint) <= bound else "TOO LARGE"
                failures += verdict != "ok"
                print(f"{name:<18} {precision}  all parameters {float(joint):.2e}  worst {worst:.2e} ({where})  loss {float(got['loss']):.6f}  {verdict}", flush=True)
    return 1 if failures else 0


def _gradients(folder: Path, name: str, layout: LayoutConfig, precision: str, *, gpu: bool) -> dict[str, torch.Tensor]:
    """Runs the layout in processes of its own and returns what rank 0 computed."""
    result = folder.parent / f"{name.replace(' ', '_').replace(',', '')}_{precision}.pt"
    environment = os.environ | ({} if gpu else {"CUDA_VISIBLE_DEVICES": ""})
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={layout.world_size}", "--master-port=29611"]
    subprocess.run([*command, "-m", "tests.gpu.rank", str(folder), repr(layout), precision, str(result)], env=environment, check=True)
    return torch.load(result, weights_only=True)


if __name__ == "__main__":
    sys.exit(main())
