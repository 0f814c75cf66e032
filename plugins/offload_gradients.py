"""``offload=gradients``: weights and optimizer state stay on the accelerator; gradients give their memory back while the engine generates.

Nothing is copied: gradients are of no use between updates, and the next backward pass begins with zeros.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from rlbatch.api import MemoryHandles, NoOptions, OffloadMemory, OffloadSpec, OffloadStrategy, hookimpl


class ReleasedGradients(OffloadStrategy):
    """Copies nothing; others move more besides."""

    def __init__(self) -> None:
        self._handles: MemoryHandles | None = None

    def attach(self, handles: MemoryHandles) -> None:
        """The engine is not there yet: gradients give their memory back before it comes."""
        self._handles = handles
        handles.release_gradients()

    @contextmanager
    def generating(self) -> Iterator[None]:
        """Releases gradients, which the next backward pass makes anew."""
        assert self._handles is not None
        self._handles.release_gradients()
        yield


@hookimpl
def rlbatch_register_offload_strategies() -> Mapping[str, OffloadSpec]:
    """Supplies ``gradients``."""
    releases = OffloadMemory(releases_gradients=True)
    return {"gradients": OffloadSpec(lambda options: ReleasedGradients(), NoOptions, memory=lambda options, precision: releases)}
