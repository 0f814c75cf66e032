"""fp8 blocks on a GPU: bitwise what the CPU computes, and how fast; a folder loads onto the GPU slice by slice.

python -m tests.gpu.fp8
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from rlbatch.api import Direct
from rlbatch.checkpoint.hf import HfTensors
from rlbatch.weights.codec import Geometry, fill
from rlbatch.weights.quantize import dequantize, quantize

ROWS, COLUMNS = 2048, 7168


def main() -> None:
    weight = (torch.randn(ROWS + 50, COLUMNS + 30) * torch.logspace(-4, 3, ROWS + 50)[:, None]).bfloat16()
    for shape in ((slice(0, ROWS), slice(0, COLUMNS)), (slice(None), slice(None)), (slice(0, 3), slice(0, 5))):
        for dtype in (torch.bfloat16, torch.float32):
            part = weight[shape].to(dtype)
            values, scales = quantize(part)
            on_gpu, gpu_scales = quantize(part.cuda())
            assert torch.equal(gpu_scales.cpu(), scales)
            assert torch.equal(on_gpu.cpu().view(torch.uint8), values.view(torch.uint8))
            for result in (torch.bfloat16, torch.float32):
                assert torch.equal(dequantize(on_gpu, gpu_scales, result).cpu(), dequantize(values, scales, result))
    print("quantize and dequantize on the GPU are bitwise the CPU's")
    part = weight[:ROWS, :COLUMNS].cuda()
    values, scales = quantize(part)
    for name, function in (("fp8 -> bf16", lambda: dequantize(values, scales)), ("bf16 -> fp8", lambda: quantize(part))):
        function()
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(20):
            function()
        torch.cuda.synchronize()
        print(f"{name}: {20 * part.nbytes / (time.perf_counter() - started) / 1e9:.0f} GB/s of bf16")
    with tempfile.TemporaryDirectory() as folder:
        save_file({"w": values.cpu(), "w_scale_inv": scales.cpu()}, Path(folder) / "model.safetensors")
        source = HfTensors(Path(folder)).source("w")
        target = torch.zeros(ROWS, COLUMNS // 2, dtype=torch.bfloat16, device="cuda")
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        fill(target, Direct("w", "w", tp_dim=1), [source], Geometry(0, 1, 1, 1), 2, 1)
        assert torch.equal(target, dequantize(values, scales)[:, COLUMNS // 2 :])
        print(f"loading took {(torch.cuda.max_memory_allocated() - before) / 2**20:.0f} MiB of GPU memory on top of the parameter")


if __name__ == "__main__":
    main()
