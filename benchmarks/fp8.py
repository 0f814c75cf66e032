"""fp8 blocks on the CPU: dequantising and quantising against the plain torch formulas, on the same cores and the same weight.

    python benchmarks/fp8.py [threads]

A weight of DeepSeek-V3's experts, [2048, 7168]. Prints GB/s of the bf16 side and how many times faster than the plain formula; exits with 1
if dequantising is less than 5 times faster. Times are CPU time divided by the threads' share of it, so that other work on the machine
changes little; each is the best of several.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

from rlbatch.weights.quantize import dequantize, quantize

ROWS, COLUMNS, BLOCK = 2048, 7168, 128
WANTED = 5.0


def plain_dequantize(values: Tensor, scales: Tensor) -> Tensor:
    return (values.float() * scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)).to(torch.bfloat16)


def plain_quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    blocks = weight.float().view(ROWS // BLOCK, BLOCK, COLUMNS // BLOCK, BLOCK)
    scales = blocks.abs().amax((1, 3)) / 448.0
    return (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn).view(ROWS, COLUMNS), scales


def best_seconds(function: Callable[[], object], threads: int, repeats: int = 7) -> float:
    function()
    times = []
    for _ in range(repeats):
        started = time.process_time()
        function()
        times.append((time.process_time() - started) / threads)
    return min(times)


def main(threads: int) -> int:
    torch.set_num_threads(threads)
    weight = (torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(1)) * 0.02).bfloat16()
    values, scales = quantize(weight)
    plain_values, plain_scales = plain_quantize(weight)
    assert torch.equal(values.view(torch.uint8), plain_values.view(torch.uint8)) and torch.equal(scales, plain_scales)
    assert torch.equal(dequantize(values, scales), plain_dequantize(values, scales))
    pairs = {
        "fp8 -> bf16": (lambda: dequantize(values, scales), lambda: plain_dequantize(values, scales)),
        "bf16 -> fp8": (lambda: quantize(weight), lambda: plain_quantize(weight)),
    }
    ratios = {}
    for name, (ours, plain) in pairs.items():
        seconds, plain_seconds = best_seconds(ours, threads), best_seconds(plain, threads)
        ratios[name] = plain_seconds / seconds
        rates = f"{weight.nbytes / seconds / 1e9:.2f} GB/s, plain {weight.nbytes / plain_seconds / 1e9:.2f} GB/s"
        print(f"{name}: {rates}, {ratios[name]:.1f} times faster ({threads} threads)")
    return 0 if ratios["fp8 -> bf16"] >= WANTED else 1


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 1))
