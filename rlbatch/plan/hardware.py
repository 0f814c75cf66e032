"""Peak rates of GPUs, by a word in their name (from the vendors' data sheets of SXM cards)."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """Peak rates of a kind of GPU.

    Attributes:
        flops: Dense bf16 FLOP/s.
        memory_gbs: Memory bandwidth, GB/s.
        link_gbs: NVLink bandwidth in one direction, GB/s.
    """

    flops: float
    memory_gbs: float
    link_gbs: float


GPUS = {
    "H100": Gpu(989e12, 3350.0, 450.0),
    "H200": Gpu(989e12, 4800.0, 450.0),
    "H20": Gpu(148e12, 4000.0, 450.0),
    "A100": Gpu(312e12, 2039.0, 300.0),
}


def known_gpu(device_name: str) -> Gpu | None:
    """The rates of a device such as ``NVIDIA H100 80GB HBM3``; None for other cards.

    PCIe and NVL variants count as other cards, since they are slower.
    """
    words = set(re.findall(r"[A-Z0-9]+", device_name.upper()))
    if words & {"PCIE", "NVL"}:
        return None
    return next((gpu for word, gpu in GPUS.items() if word in words), None)
