"""Model FLOPs utilisation, counted as Megatron counts it: what the model needs, not what the implementation spends.

Not counted: recomputation, the router, the embedding lookup, norms and activations. Numbers of other frameworks that count attention
without the causal half, or the embedding twice, are higher for the same speed.
"""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Sequence

from rlbatch.api import ModelFamily

PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "H20": 148e12, "A100": 312e12}
"""Dense bf16 FLOP/s of the SXM cards (vendor data sheets), by the word in the device's name."""


def matmul_flops_per_token(family: ModelFamily) -> float:
    """Forward FLOPs of a token in matrix products with weights: attention projections, MLPs, top-k and shared experts, logits."""
    t = family.transformer
    hidden = int(t["hidden_size"])
    matrices = 3 if t.get("gated_linear_unit") else 2
    dense_width = int(t.get("ffn_hidden_size") or 4 * hidden)
    expert_width = int(t.get("moe_router_topk", 2)) * int(t.get("moe_ffn_hidden_size") or dense_width)
    expert_width += int(t.get("moe_shared_expert_intermediate_size") or 0)
    with_experts = _layers_with_experts(family)
    width = with_experts * expert_width + (family.num_layers - with_experts) * dense_width
    return 2.0 * (family.num_layers * _attention_weights(family) + matrices * hidden * width + hidden * family.vocab_size)


def attention_flops_per_squared_token(family: ModelFamily) -> float:
    """Forward FLOPs of causal attention over a sequence of L tokens, divided by L^2: half of the pairs, two FLOPs a multiply-add."""
    return float(family.num_layers * family.transformer["num_attention_heads"] * sum(_head_dims(family)))


def _layers_with_experts(family: ModelFamily) -> int:
    if not family.num_experts:
        return 0
    frequency = family.transformer.get("moe_layer_freq", 1)
    return len(range(0, family.num_layers, frequency)) if isinstance(frequency, int) else sum(frequency)


def _attention_weights(family: ModelFamily) -> int:
    """Elements of a layer's projections."""
    t = family.transformer
    hidden, heads = int(t["hidden_size"]), int(t["num_attention_heads"])
    key, value = _head_dims(family)
    if not t.get("multi_latent_attention"):
        groups = int(t.get("num_query_groups") or heads)
        return hidden * key * (heads + 2 * groups) + heads * value * hidden
    rank, query_rank = int(t["kv_lora_rank"]), t.get("q_lora_rank")
    query = hidden * heads * key if query_rank is None else int(query_rank) * (hidden + heads * key)
    latent = hidden * (rank + int(t["qk_pos_emb_head_dim"])) + rank * heads * (int(t["qk_head_dim"]) + value)
    return query + latent + heads * value * hidden


def _head_dims(family: ModelFamily) -> tuple[int, int]:
    """Of queries and keys, and of values."""
    t = family.transformer
    if t.get("multi_latent_attention"):
        return int(t["qk_head_dim"]) + int(t["qk_pos_emb_head_dim"]), int(t["v_head_dim"])
    dim = int(t.get("kv_channels") or t["hidden_size"] // t["num_attention_heads"])
    return dim, dim


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


def peak_flops(device: str) -> float:
    """FLOP/s that one rank could reach at best.

    A known accelerator: the dense bf16 figure of ``PEAK_FLOPS``, whatever precision is used. Anything else, the CPU above all: measured
    once by a short matrix product (float32 on the CPU, bfloat16 on an accelerator) with the threads that the process has.

    Args:
        device: ``cpu`` or ``cuda:<index>``.
    """
    if device != "cpu":
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
