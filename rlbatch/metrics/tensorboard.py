"""TensorBoard events of a run."""

from __future__ import annotations

from pathlib import Path

from rlbatch.api import StepResult

FLUSH_S = 5
"""Longest time that a step's values stay in memory: what a killed run loses."""


class TensorBoard:
    """Writes every metric of every step as a scalar; NaN and infinity are kept, so that a broken value shows."""

    def __init__(self, folder: Path) -> None:
        """Opens an event file in ``folder``, which is created if missing."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), flush_secs=FLUSH_S)

    def record(self, result: StepResult) -> None:
        """Adds the step's metrics."""
        for tag, value in result.metrics.items():
            self._writer.add_scalar(tag, value, result.step)

    def close(self) -> None:
        """Writes what is left."""
        self._writer.close()
