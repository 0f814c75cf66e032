"""Writes a run's TensorBoard events."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlbatch.api import StepResult


class TensorBoard:
    """Writes every metric of every step as a scalar; NaN and infinity are kept, so that a broken value shows."""

    def __init__(self, folder: Path) -> None:
        """Args:
        folder: Of the event files; created with the first of them.
        """
        self._folder = folder
        self._purge_step: int | None = None
        self._open: Any = None

    def begin(self, done: int) -> None:
        """Hides what earlier event files have of steps after ``done`` (0: of all). Before the first ``record``."""
        if any(self._folder.glob("events.*")):
            self._purge_step = done + 1 if done else 0

    def record(self, result: StepResult) -> None:
        """Adds the step's metrics; they are on disk on return, so that a killed run loses none."""
        for tag, value in result.metrics.items():
            self._writer.add_scalar(tag, value, result.step)
        self._writer.flush()

    def close(self) -> None:
        """Ends the event file."""
        if self._open:
            self._open.close()

    @property
    def _writer(self) -> Any:
        if self._open is None:
            from torch.utils.tensorboard import SummaryWriter

            self._open = SummaryWriter(str(self._folder), purge_step=self._purge_step)
        return self._open
