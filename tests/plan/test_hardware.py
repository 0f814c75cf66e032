from __future__ import annotations

import pytest

from rlbatch.plan.hardware import known_gpu


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H200", 989),
        ("NVIDIA H20", 148),
        ("NVIDIA H20-3e", 148),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H100 NVL", None),
        ("NVIDIA L4", None),
    ],
)
def test_peaks_by_device_name(name: str, tflops: float | None) -> None:
    """Known cards have their dense bf16 peak; H20 is not H200, and slower variants are not taken for the SXM card."""
    gpu = known_gpu(name)
    assert (gpu and gpu.flops) == (None if tflops is None else tflops * 1e12)
