"""Ends a job whose ranks died, left early or hang, and says which one it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from rlbatch.config.schema import LaunchConfig

Phase = Literal["start", "generation", "training", "checkpoint"]
"""What a rank does; its hang limit is ``launch.<phase>_limit_s``."""


class Watchdog:
    """Watches the ranks of a job from a thread of each.

    Every beginning and end of a phase is a sign of life: the limit counts from there. Outside of phases that of ``training`` holds.
    """

    def __init__(self, limits: LaunchConfig) -> None:
        """Args:
        limits: Hang limits.
        """
        self._limits = limits

    @contextmanager
    def phase(self, name: Phase) -> Iterator[None]:
        """What this rank does until the block ends; a block inside another counts alone."""
        yield

    def limit_s(self, name: Phase) -> float:
        """Hang limit of a phase, seconds."""
        return float(getattr(self._limits, f"{name}_limit_s"))
