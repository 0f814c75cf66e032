"""Model FLOPs utilisation: the FLOPs that the model needs (``rlbatch.plan.flops``), divided by what the hardware could do."""

from __future__ import annotations

import functools
import time

from rlbatch.plan.hardware import known_gpu


def mfu(flops: float, seconds: float, world_size: int, peak_flops: float) -> float:
    """Share of the peak that is used by ``flops`` of all ranks in ``seconds``, with ``peak_flops`` of each rank."""
    return flops / (seconds * world_size * peak_flops)


def peak_flops(device: str, tflops: float = 0.0) -> float:
    """The peak rate of one rank, FLOP/s.

    A known accelerator: the dense bf16 figure of the cluster or of ``rlbatch.plan.hardware``, whatever precision is used. Anything else,
    the CPU above all: measured once by a short matrix product (float32 on the CPU, bfloat16 on an accelerator) with the threads that the
    process has.

    Args:
        device: ``cpu`` or ``cuda:<index>``.
        tflops: ``cluster.gpu_bf16_tflops``; 0 if not set.
    """
    if device != "cpu":
        if tflops:
            return tflops * 1e12
        import torch

        known = known_gpu(torch.cuda.get_device_name(device))
        if known is not None:
            return known.flops
    return _measured_peak_flops(device)


@functools.cache
def _measured_peak_flops(device: str) -> float:
    import torch

    size, dtype = (512, torch.float32) if device == "cpu" else (8192, torch.bfloat16)
    matrix = torch.ones(size, size, dtype=dtype, device=device)

    def seconds() -> float:
        start = time.perf_counter()
        # Reading one element waits for the accelerator.
        float((matrix @ matrix)[0, 0])
        return time.perf_counter() - start

    return 2.0 * size**3 / min(seconds() for _ in range(8))
