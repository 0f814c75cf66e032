"""Counts the bytes of a checkpoint."""

from __future__ import annotations

CHECKPOINT_BYTES = {"bf16": 14, "fp32": 16}
"""Bytes for each parameter in a checkpoint, by ``train.precision``: the trained weight, its fp32 main weight and Adam's two moments."""


def checkpoint_bytes(num_parameters: float, precision: str) -> float:
    """The size of a checkpoint, bytes.

    Args:
        num_parameters: Parameters of the model.
        precision: ``train.precision``.
    """
    return num_parameters * CHECKPOINT_BYTES[precision]
