"""The base of the strategies that move something."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rlbatch.api import MemoryHandles

from ..offload_gradients import ReleasedGradients
from .host_copies import Moved


class Moving(ReleasedGradients):
    """An ``OffloadStrategy`` that gives gradients back, and may move optimizer state, weights or both.

    Optimizer state is copied out as soon as training ends, beside whatever follows; weights beside the sync that reads them. Weights come
    back first, the state beside log-probs and backward pass, until the optimizer wants it.

    Args:
        state: Whether it moves optimizer state.
        weights: Whether it moves weights.
        is_pinned: Whether host memory is page-locked.
    """

    def __init__(self, *, state: bool, weights: bool, is_pinned: bool) -> None:
        super().__init__()
        self.moves_weights, self._moves_state, self._is_pinned = weights, state, is_pinned

    def attach(self, handles: MemoryHandles) -> None:
        """See ``ReleasedGradients``; nothing moves yet."""
        super().attach(handles)
        self._state = Moved(handles, handles.optimizer_state if self._moves_state else tuple, is_pinned=self._is_pinned)
        self._weights = Moved(handles, handles.weights if self.moves_weights else tuple, is_pinned=self._is_pinned)

    @contextmanager
    def generating(self) -> Iterator[None]:
        """A context in which the state leaves the accelerator; at its end, also after an error, all comes back."""
        with super().generating():
            self._state.finish_out()
            try:
                yield
            finally:
                self._weights_back()
                self._state.start_back()

    def sync_begins(self) -> None:
        """Brings the weights back, and begins to copy them while they are read for engines."""
        self._weights_back()
        self._weights.start_out()

    def sync_ends(self) -> None:
        """Lets the weights leave the accelerator."""
        self._weights.finish_out()

    @contextmanager
    def training(self) -> Iterator[None]:
        """A context at whose end copies of the new state begin."""
        yield
        self.settle()
        self._state.start_out()

    def settle(self) -> None:
        """See ``OffloadStrategy``."""
        self._state.finish_back()

    def _weights_back(self) -> None:
        self._weights.start_back()
        self._weights.finish_back()
