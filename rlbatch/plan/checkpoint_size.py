"""Counts the bytes of a checkpoint."""

from __future__ import annotations

CHECKPOINT_BYTES = {"bf16": 14, "fp32": 16}
"""Of a parameter in a checkpoint: the weight as it is trained, then its fp32 main weight and Adam's two moments."""


def checkpoint_bytes(num_parameters: float, precision: str) -> float:
    """Size of a checkpoint.

    Args:
        num_parameters: Of the model.
        precision: ``train.precision``.
    """
    return num_parameters * CHECKPOINT_BYTES[precision]
