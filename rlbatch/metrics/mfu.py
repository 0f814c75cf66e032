"""Counts model FLOPs utilisation as Megatron does: what the model needs, not what the implementation spends.

Not counted: recomputation, the router, the embedding lookup, norms and activations. Numbers of other frameworks that count attention
without the causal half, or the embedding twice, are higher for the same speed.
"""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Sequence

from rlbatch.api import ModelFamily
from rlbatch.plan.parameters import ModelSize

PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "H20": 148e12, "A100": 312e12}
"""Dense bf16 FLOP/s of the SXM cards (vendor data sheets), by the word in the device's name."""


def matmul_flops_per_token(family: ModelFamily) -> float:
    """Forward FLOPs of a token in matrix products with weights: attention projections, MLPs, top-k and shared experts, logits."""
    size = ModelSize(family).total
    experts = size.experts * int(family.transformer.get("moe_router_topk", 2)) / (family.num_experts or 1)
    return 2.0 * (size.dense - size.vocabulary - size.unquantised + experts + int(family.transformer["hidden_size"]) * family.vocab_size)


def attention_flops_per_squared_token(family: ModelFamily) -> float:
    """Forward FLOPs of causal attention over a sequence of L tokens, divided by L^2: half of the pairs, two FLOPs a multiply-add."""
    return float(family.num_layers * family.transformer["num_attention_heads"] * sum(family.head_sizes))


def forward_flops(family: ModelFamily, lengths: Sequence[int]) -> float:
    """FLOPs of one forward pass over sequences of these lengths (tokens, without padding)."""
    tokens, squares = sum(lengths), sum(length * length for length in lengths)
    return matmul_flops_per_token(family) * tokens + attention_flops_per_squared_token(family) * squares


def training_flops(family: ModelFamily, lengths: Sequence[int]) -> float:
    """FLOPs of one forward and backward pass: three times the forward pass."""
    return 3.0 * forward_flops(family, lengths)


def mfu(flops: float, seconds: float, world_size: int, peak_flops: float) -> float:
    """Share of the peak that was used: ``flops`` of all ranks together in ``seconds``, ``peak_flops`` of one rank."""
    return flops / (seconds * world_size * peak_flops)


def peak_flops(device: str, tflops: float = 0.0) -> float:
    """FLOP/s that one rank could reach at best.

    A known accelerator: the dense bf16 figure of the cluster or of ``PEAK_FLOPS``, whatever precision is used. Anything else, the CPU above
    all: measured once by a short matrix product (float32 on the CPU, bfloat16 on an accelerator) with the threads that the process has.

    Args:
        device: ``cpu`` or ``cuda:<index>``.
        tflops: ``cluster.gpu_bf16_tflops``; 0: not said.
    """
    if device != "cpu":
        if tflops:
            return tflops * 1e12
        import torch

        known = known_peak_flops(torch.cuda.get_device_name(device))
        if known is not None:
            return known
    return _measured_peak_flops(device)


def known_peak_flops(device_name: str) -> float | None:
    """The table's figure for a name such as ``NVIDIA H100 80GB HBM3``; None for other cards.

    PCIe and NVL variants are other cards: they are slower.
    """
    words = set(re.findall(r"[A-Z0-9]+", device_name.upper()))
    if words & {"PCIE", "NVL"}:
        return None
    return next((peak for word, peak in PEAK_FLOPS.items() if word in words), None)


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
