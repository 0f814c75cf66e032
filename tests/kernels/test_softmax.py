"""Log-probs' kernels for GPUs, here by Triton's interpreter, against torch's operations; ``tests.gpu.kernels`` compares them on a GPU."""

from __future__ import annotations

from pathlib import Path

from tests.kernels.triton_here import said_by

FLOAT32, BFLOAT16 = 1e-5, 8e-3
"""Relative; the interpreter cuts numbers to bf16 where GPUs round."""


def test_both_compute_the_same(repository: Path) -> None:
    """Values of several blocks of columns, of targets and maxima anywhere, of rows without a token; and the gradient, 0 in padding."""
    errors = said_by(repository, "softmax_by_triton.py", TRITON_INTERPRET="1")
    wrong = {name: error for name, error in errors.items() if error > (BFLOAT16 if "bfloat16 " in name and "gradient" in name else FLOAT32)}
    assert not wrong
    assert all(error == 0 for name, error in errors.items() if "padding" in name)
