"""Finds where ranks are when a job hangs, and which of them the others wait for."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

_WAITS = ("torch/distributed/", "rlbatch/launch/membership/store.py", "pipeline_parallel/p2p_communication.py")
"""Code in which a rank waits for others."""
MAX_FRAMES = 12


@dataclass(frozen=True)
class StackLocation:
    """The place in the code where a rank's main thread is.

    Attributes:
        frames: ``plugins/reward.py:12 score``, the innermost first; those of torch.distributed left out.
        waits: Whether it is in code that waits for other ranks.
    """

    frames: tuple[str, ...]
    waits: bool

    def __str__(self) -> str:
        """The innermost frame."""
        return self.frames[0] if self.frames else "an unknown place"


def main_thread_location() -> StackLocation:
    """Finds where this process's main thread is right now; called by another thread."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    frames: list[FrameType] = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    waits = [any(part in frame.f_code.co_filename for part in _WAITS) for frame in frames]
    shown = [_shown(frame) for frame, is_wait in zip(frames, waits, strict=True) if not is_wait]
    return StackLocation(tuple(shown[:MAX_FRAMES]), any(waits))


def _shown(frame: FrameType) -> str:
    path = Path(frame.f_code.co_filename)
    return f"{'/'.join(path.parts[-3:])}:{frame.f_lineno} {frame.f_code.co_name}"


def find_culprit(locations: Mapping[int, StackLocation | None]) -> int:
    """The rank that the others most likely wait for.

    In this order: a rank that gave no answer, one that waits for nobody, one that waits where the fewest do.

    Args:
        locations: Location of every rank that still runs; None: it gave no answer.
    """
    silent = [rank for rank, location in locations.items() if location is None]
    if silent:
        return min(silent)
    known = {rank: location for rank, location in locations.items() if location is not None}
    working = {rank: location for rank, location in known.items() if not location.waits}
    where = {rank: location.frames for rank, location in (working or known).items()}
    counts = Counter(where.values())
    return min(where, key=lambda rank: (counts[where[rank]], rank))
