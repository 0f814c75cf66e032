"""Finds the lines of code that hold the memory of a GPU, from the records of torch's allocator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

MOST = 5
BEFORE = "before the first step"
_LIBRARY = f"{Path(torch.__file__).parent}/"

Owners = Sequence[tuple[str, int]]
"""Lines of code and their bytes, the largest first."""


def record_owners() -> None:
    """Makes the allocator record where memory in use was requested, which takes some microseconds each. Does nothing without a GPU."""
    if torch.cuda.is_available():
        torch.cuda.memory._record_memory_history("state", context="state", stacks="python", max_entries=1)


def memory_snapshot() -> dict[str, Any]:
    """The allocator's records, for docs.pytorch.org/memory_viz; empty if they cannot be read. Never raises."""
    with suppress(Exception):
        return dict(torch.cuda.memory._snapshot())
    return {}


def largest_owners(snapshot: Mapping[str, Any], most: int = MOST) -> Owners:
    """The lines of code that hold most memory.

    Args:
        snapshot: Result of ``memory_snapshot``.
        most: Largest number of lines.
    """
    sizes: Counter[str] = Counter()
    for segment in snapshot.get("segments", ()):
        for block in segment["blocks"]:
            if block["state"] == "active_allocated":
                sizes[_owner(block.get("frames") or ())] += block["size"]
    return sizes.most_common(most)


def _owner(frames: Iterable[Mapping[str, Any]]) -> str:
    """The innermost line of code that is not torch's own, as text."""
    for frame in frames:
        if not frame["filename"].startswith(_LIBRARY) and frame["filename"].endswith(".py"):
            place = frame["filename"].rpartition("/site-packages/")[2]
            return f"{'/'.join(Path(place).parts[-4:]).lstrip('/')}:{frame['line']} {frame['name']}"
    return "backward passes of torch's own" if frames else BEFORE
