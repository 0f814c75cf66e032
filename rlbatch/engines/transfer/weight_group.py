"""A group of the rank that sends weights and an engine's workers on GPUs of their own: NCCL, or Gloo where there are none.

It is no part of ``torch.distributed``'s default group, which both sides have for themselves, and pickles nothing.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

SENDER = 0


class WeightGroup:
    """This process's place in the group; made by all of its members at the same time.

    Args:
        path: Path of a file that all of them see, and none did before.
        rank: This process's; ``SENDER`` sends.
        size: Number of members.
        device: ``torch.device`` or its name.
        limit_s: Most seconds for meeting the others, and for one broadcast.

    Raises:
        RuntimeError: the others do not come.
    """

    def __init__(self, path: Path, rank: int, size: int, device: Any, limit_s: float) -> None:
        import torch
        from torch import distributed as dist

        self._device, self._limit = torch.device(device), timedelta(seconds=limit_s)
        store = dist.FileStore(str(path), size)
        store.set_timeout(self._limit)
        kind: Any = dist.ProcessGroupGloo if self._device.type == "cpu" else dist.ProcessGroupNCCL
        options = kind._Options() if hasattr(kind, "_Options") else kind.Options()
        options._timeout = self._limit
        if self._device.type == "cpu":
            options._devices = [kind.create_device(hostname="127.0.0.1")]
            self._group = kind(store, rank, size, options)
        else:
            with torch.cuda.device(self._device):
                self._group = kind(store, rank, size, options)
        self._pending: list[Any] = []
        self._broadcast(torch.zeros(1, dtype=torch.uint8, device=self._device)).wait()  # so that all have met
        if self._device.type != "cpu":
            torch.cuda.synchronize(self._device)

    def send(self, memory: Tensor) -> None:
        """Sends [bytes] uint8 memory to the workers, which is read until they have answered."""
        self._pending = [work for work in self._pending if not work.is_completed()]
        self._pending.append(self._broadcast(memory))

    def receive(self, memory: Tensor) -> None:
        """Fills [bytes] uint8 memory; what is done on this process's stream from here on sees it."""
        self._broadcast(memory).wait()

    def abort(self) -> None:
        """Ends what is under way: another member is gone."""
        if hasattr(self._group, "abort"):
            with suppress(RuntimeError):
                self._group.abort()

    def _broadcast(self, memory: Tensor) -> Any:
        from torch import distributed as dist

        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = SENDER, 0, self._limit
        return self._group.broadcast([memory], options)


def join_in_background(path: Path, size: int, device: Any, limit_s: float) -> Future[WeightGroup]:
    """Makes the sender's ``WeightGroup`` in a thread: its maker need not wait for members that do not come any more."""
    made: Future[WeightGroup] = Future()

    def make() -> None:
        try:
            made.set_result(WeightGroup(path, SENDER, size, device, limit_s))
        except RuntimeError as error:
            made.set_exception(error)

    threading.Thread(target=make, daemon=True, name="rlbatch-weight-group").start()
    return made
