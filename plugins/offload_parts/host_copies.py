"""Tensors that leave the accelerator for host memory, and come back to where everybody knows them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rlbatch.api import MemoryHandles

if TYPE_CHECKING:
    from torch import Tensor


class Moved:
    """Tensors whose storage is emptied and filled again; the tensors stay, and with them the views that others have of them.

    Copies run beside other work, on a stream of their own. Host memory is made when a tensor first needs it, and then kept: Adam's moments
    come with the first update.

    Args:
        handles: Makes host memory.
        tensors: What to move, always in the same order; nothing at all costs nothing.
        is_pinned: Whether host memory is page-locked.
    """

    def __init__(self, handles: MemoryHandles, tensors: Callable[[], Iterable[Tensor]], *, is_pinned: bool) -> None:
        import torch

        self._handles, self._tensors, self._is_pinned = handles, tensors, is_pinned
        self._stream = torch.cuda.Stream() if torch.cuda.is_available() else None
        self._memory: list[Tensor] = []
        self._copies: list[tuple[Tensor, Tensor]] = []
        self._copied: list[tuple[int, int]] = []
        self._is_away = self._is_coming = False

    def start_out(self) -> None:
        """Begins to copy; the tensors may be read meanwhile."""
        if not self._is_away:
            tensors = self._movable()
            self._copies, self._copied = list(zip(tensors, self._places(tensors), strict=True)), _marks(tensors)
            with self._beside():
                for tensor, copy in self._copies:
                    copy.copy_(tensor, non_blocking=True)

    def finish_out(self) -> None:
        """Copies what is not copied yet, or was written to since, and empties the storage."""
        import torch

        if self._is_away:
            return
        if self._copied != _marks(self._movable()):
            self.start_out()
        if not self._copies:
            return
        if self._stream is not None:
            torch.cuda.synchronize()  # what was enqueued before may read the tensors too
        for tensor, _ in self._copies:
            tensor.untyped_storage().resize_(0)
        if self._stream is not None:
            torch.cuda.empty_cache()
        self._is_away, self._is_coming = True, False

    def start_back(self) -> None:
        """Begins to fill the storage; nobody may read or write the tensors before ``finish_back``."""
        if not self._is_away:
            return
        for tensor, _ in self._copies:
            tensor.untyped_storage().resize_(tensor.nbytes)
        with self._beside():
            for tensor, copy in self._copies:
                tensor.copy_(copy, non_blocking=True)
        self._is_away, self._is_coming, self._copies, self._copied = False, True, [], []

    def finish_back(self) -> None:
        """Lets the current stream wait for what comes back. The caller may write to the tensors: a copy that has begun counts no more."""
        import torch

        if self._is_coming and self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
        self._is_coming = False
        if not self._is_away:
            self._copied = []

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """A context on the copies' stream, which first waits for what the current stream has been given so far."""
        import torch

        with torch.no_grad():
            if self._stream is None:
                yield
                return
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                yield

    def _movable(self) -> list[Tensor]:
        return [tensor for tensor in self._tensors() if _owns_storage(tensor)]

    def _places(self, tensors: list[Tensor]) -> list[Tensor]:
        """Host memory of each tensor: what there is, in order, and new for all that have none."""
        places: list[Tensor] = []
        number, used = 0, 0
        for at, tensor in enumerate(tensors):
            while number < len(self._memory) and used + tensor.nbytes > len(self._memory[number]):
                number, used = number + 1, 0
            if number == len(self._memory):
                size = sum(_aligned(each.nbytes) for each in tensors[at:])
                self._memory.append(self._handles.host_memory(size, is_pinned=self._is_pinned))
            places.append(self._memory[number][used : used + tensor.nbytes].view(tensor.dtype).view(tensor.shape))
            used += _aligned(tensor.nbytes)
        return places


def _owns_storage(tensor: Tensor) -> bool:
    """Whether the storage holds this tensor and nothing else, and can be emptied: on CPUs not where NumPy has seen it."""
    storage = tensor.untyped_storage()
    return tensor.numel() > 0 and storage.nbytes() == tensor.nbytes and storage.resizable()


def _marks(tensors: Iterable[Tensor]) -> list[tuple[int, int]]:
    """Address and version of each tensor: they change when it is moved or written to."""
    return [(tensor.data_ptr(), tensor._version) for tensor in tensors]


def _aligned(num_bytes: int) -> int:
    """The next multiple of 16, where any number may begin."""
    return -(-num_bytes // 16) * 16
