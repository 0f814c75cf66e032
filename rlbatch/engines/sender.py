"""Buckets of weights from the ranks of an engine to its workers, each through memory of the device that both use."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable

from rlbatch.api import RolloutError, WeightBucket
from rlbatch.engines.client import Call, EngineHost
from rlbatch.engines.mapping import Handle, SharedMemory, device_identity
from rlbatch.engines.packing import layout, pack

Gather = Callable[[bytes], list[bytes]]
"""All-gather over the ranks of an engine, in their order; also a barrier."""

GIB = 2**30


class WeightSender:
    """This rank's part in sending weights to the engine that it shares with its neighbours.

    Every rank packs what its own device's workers read; the first of them holds the host and tells it. While an engine loads a bucket
    the ranks gather the next one; the memory is written again once the engine has answered.

    Args:
        host: The engine; None on the ranks that have none.
        device: This rank's.
        gather: Over the engine's ranks.
        limit_s: Longest loading of one bucket.
    """

    def __init__(self, host: EngineHost | None, device: str, gather: Gather, limit_s: float) -> None:
        self._host, self._device, self._gather, self._limit_s = host, device, gather, limit_s
        self._memory: SharedMemory | None = None
        self._handles: dict[str, Handle] = {}
        self._serial = 0

    def send(self, buckets: Iterable[WeightBucket]) -> int:
        """Sends every bucket; a collective of the engine's ranks.

        Returns:
            The policy version of the weights; -1 if there were none.

        Raises:
            RolloutError: the engine refuses a tensor, or there is no memory for a bucket.
        """
        version, loading = -1, None
        try:
            for bucket in buckets:
                version = bucket.policy_version
                places, size = layout(bucket.names, bucket.tensors)
                self._await(loading)
                self._reserve(size)
                assert self._memory is not None
                pack(self._memory.tensor, places, bucket.tensors)
                self._written()
                if self._host is not None:
                    update = {"serial": self._serial, "handles": self._handles, "places": places}
                    loading = self._host.begin("load_weights", payload=json.dumps(update).encode())
            self._await(loading)
        finally:
            self._release()
        return version

    def _await(self, loading: Call | None) -> None:
        """The memory may be written again, on every rank of the engine."""
        if loading is not None:
            loading.result(self._limit_s)
        self._gather(b"")

    def _written(self) -> None:
        if self._device != "cpu":
            import torch

            torch.cuda.synchronize(self._device)
        self._gather(b"")

    def _reserve(self, size: int) -> None:
        """Memory for a bucket; every rank has the same buckets, so that all make new memory or none does."""
        if self._memory is not None and len(self._memory.tensor) >= size:
            return
        self._release()
        try:
            self._memory = SharedMemory(max(size, 1), self._device)
        except OSError as error:
            raise RolloutError(
                f"rollout.bucket_mib: a bucket of weights needs {size / GIB:.2f} GiB ({error.strerror}). "
                "Lower it, or give the job more memory."
            ) from error
        self._serial += 1
        mine = json.dumps([device_identity(self._device), self._memory.handle])
        self._handles = dict(json.loads(theirs) for theirs in self._gather(mine.encode()))

    def _release(self) -> None:
        if self._memory is not None:
            self._memory.close()
            self._memory = None
