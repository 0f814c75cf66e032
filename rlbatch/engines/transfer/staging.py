"""What a rank shows its device's workers: the trainer's own tensors where they lie, and copies of all others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import ref

from rlbatch.api import RolloutError, WeightBucket
from rlbatch.engines.transfer.buckets import TensorLocation, aligned, pack, tensor_location
from rlbatch.engines.transfer.cuda_memory import allocate
from rlbatch.engines.transfer.shared_memory import Handle, MemoryFile, Shared, is_still, share

if TYPE_CHECKING:
    import torch
    from torch import Tensor

GIB = 2**30
FIRST_CALL_BYTES = GIB // 2
"""Bytes read in place of which the engine is told at once, to copy them while this rank looks up more."""
GROWTH = 16
"""Factor from ``FIRST_CALL_BYTES`` to the limit of later calls, at which a call takes about as long as copying what it tells of."""
CallContent = dict[str, Any]
"""``memories`` (key -> handle), ``lasting`` (keys of those that stay as they are until the sync is over) and ``locations``; JSON."""


@dataclass(frozen=True)
class StagedBucket:
    """A bucket's tensors.

    Attributes:
        in_place: Where those lie that are read in place.
        handles: Memory's key -> handle.
        copied: Names and tensors of the others.
        size: Bytes that the others take.
        limit: Bytes that all would take.
    """

    in_place: list[TensorLocation]
    handles: dict[str, Handle]
    copied: list[tuple[str, Tensor]]
    size: int
    limit: int


@dataclass(frozen=True)
class _KnownBucket:
    """A bucket that was all read in place, which a trainer sends again and again.

    Attributes:
        names: Names of its tensors.
        tensors: The objects; they are not kept.
        where: Their addresses.
        firsts: Memory's key -> number of one tensor in it.
        staged: What was found.
    """

    names: Sequence[str]
    tensors: list[ref[Tensor]]
    where: list[int]
    firsts: dict[str, int]
    staged: StagedBucket


class Staging:
    """Collects tensors until there are enough for a call. Copies go into one of two memories, in turns, or always into the same.

    A tensor that lasts until the end of the sync is not copied if workers can open its memory: an allocation of a GPU, or ``MemoryFile``.

    Args:
        device: This rank's.
        can_share: Whether workers can open this device's memory; if not, every tensor is copied.
    """

    def __init__(self, device: str, *, can_share: bool) -> None:
        self._device, self._can_share = device, can_share
        self._memories: list[_Memory | None] = [None, None]
        self._turns, self._turn, self._used, self._largest = 2, 0, 0, 1
        self._in_place_bytes, self._call_bytes = 0, FIRST_CALL_BYTES
        self._locations: list[TensorLocation] = []
        self._handles: dict[str, Handle] = {}
        self._lasting: set[str] = set()
        self._shared_memory: dict[int, tuple[int, Shared] | None] = {}
        self._checked: set[int] = set()
        self._last_locations: dict[str, tuple[torch.dtype, torch.Size, TensorLocation]] = {}
        self._before: dict[str, _KnownBucket] = {}

    def start(self, *, double_buffered: bool) -> None:
        """A new sync. Without double buffering each call must be over when the next one's tensors are added: that takes half the memory."""
        self._turns = 2 if double_buffered else 1

    def stage(self, bucket: WeightBucket) -> StagedBucket:
        """Divides a bucket into tensors that must be copied and tensors that are read in place."""
        where = [tensor.data_ptr() for tensor in bucket.tensors]
        before = self._before.get(bucket.names[0] if bucket.names else "")
        if before is not None and self._is_same(bucket, where, before):
            return before.staged
        in_place: list[TensorLocation] = []
        handles: dict[str, Handle] = {}
        copied: list[tuple[str, Tensor]] = []
        firsts: dict[str, int] = {}
        lasting = bucket.lasting or [False] * len(bucket.names)
        for index, (name, tensor, lasts) in enumerate(zip(bucket.names, bucket.tensors, lasting, strict=True)):
            shared = self._shared(tensor) if lasts and self._can_share and tensor.is_contiguous() else None
            if shared is None:
                copied.append((name, tensor))
            else:
                key, handle, start = shared
                handles[key] = handle
                firsts.setdefault(key, index)
                in_place.append(self._location(name, tensor, key, start))
        found = StagedBucket(in_place, handles, copied, _size([tensor for _, tensor in copied]), _size(bucket.tensors))
        if bucket.names and not copied:
            self._before[bucket.names[0]] = _KnownBucket(bucket.names, [ref(tensor) for tensor in bucket.tensors], where, firsts, found)
        return found

    def _is_same(self, bucket: WeightBucket, where: list[int], before: _KnownBucket) -> bool:
        """Whether its tensors are those of an earlier bucket, all of which was read in place, and still lie there."""
        locations = before.staged.in_place
        return (
            before.where == where
            and before.names == bucket.names
            and len(bucket.lasting) == len(where)
            and all(bucket.lasting)
            and all(known() is tensor for known, tensor in zip(before.tensors, bucket.tensors, strict=True))
            and all(
                (found := self._shared(bucket.tensors[index])) is not None and (found[0], found[2]) == (key, locations[index]["start"])
                for key, index in before.firsts.items()
            )
        )

    @property
    def is_full(self) -> bool:
        """Whether so much is read in place that the engine should be told."""
        return self._in_place_bytes >= self._call_bytes

    def has_room(self, bucket: StagedBucket) -> bool:
        """Whether ``add`` needs no ``take`` before it."""
        if self.is_full:
            return False
        memory = self._memories[self._turn]
        return self._used == 0 or bucket.size == 0 or (memory is not None and self._used + bucket.size <= len(memory.tensor))

    def add(self, bucket: StagedBucket) -> None:
        """Takes a bucket in; of its tensors only those that last are needed afterwards.

        Raises:
            RolloutError: there is no memory for it.
        """
        self._locations += bucket.in_place
        self._handles |= bucket.handles
        self._lasting |= bucket.handles.keys()
        self._in_place_bytes += bucket.limit - bucket.size
        if not bucket.copied:
            return
        memory = self._memory(bucket)
        key, handle, start = memory.shared
        locations: list[TensorLocation] = []
        for name, tensor in bucket.copied:
            locations.append(tensor_location(name, tensor, key, self._used))
            self._used += aligned(tensor.nbytes)
        pack(memory.tensor, locations, [tensor for _, tensor in bucket.copied])
        self._locations += [each | {"start": each["start"] + start} for each in locations]
        if key:
            self._handles[key] = handle

    def take(self) -> tuple[CallContent, Tensor]:
        """Waits for the copies; returns what was added since the last call, and the part of this rank's memory that the copies take.

        Its memory is written again after the next ``take``, or at once without double buffering: not before the workers have read it.
        """
        import torch

        if self._device != "cpu":
            torch.cuda.current_stream(self._device).synchronize()  # not what a group is sending
        memory = self._memories[self._turn]
        content = {"memories": self._handles, "lasting": sorted(self._lasting), "locations": self._locations}
        part = torch.empty(0, dtype=torch.uint8) if memory is None else memory.tensor[: self._used]
        self._turn = (self._turn + 1) % self._turns
        if self.is_full:
            self._call_bytes *= GROWTH
        self._forget()
        return content, part

    def release(self) -> None:
        """Ends a sync: a GPU's memory goes back to the trainer. Host memory stays, since making it takes longer than using it."""
        self._shared_memory = {storage: self._shared_memory[storage] for storage in self._checked}
        self._checked.clear()
        # Every sync starts with the same memory: what lies where is then what the workers know from the last one.
        self._turn, self._call_bytes = 0, FIRST_CALL_BYTES
        self._forget()
        if self._device != "cpu":
            self._memories = [None, None]

    def _forget(self) -> None:
        self._used, self._in_place_bytes, self._locations, self._handles, self._lasting = 0, 0, [], {}, set()

    def _location(self, name: str, tensor: Tensor, memory: str, start: int) -> TensorLocation:
        """Describes where a tensor is that is read in place, by the object of the last sync if it is still there: quick to compare."""
        dtype, shape, before = self._last_locations.get(name, (None, None, {}))
        if tensor.dtype is dtype and tensor.shape == shape and before["start"] == start and before["memory"] == memory:
            return before
        now = tensor_location(name, tensor, memory, start)
        self._last_locations[name] = tensor.dtype, tensor.shape, now
        return now

    def _shared(self, tensor: Tensor) -> Shared | None:
        """Shares a tensor by ``shared_memory.share``, which is asked once for every storage; later syncs ask only whether that holds."""
        storage = tensor.untyped_storage().data_ptr()
        known = self._shared_memory.get(storage)
        if storage not in self._checked:
            if known is None or not is_still(tensor, known[1][0]):
                found = share(tensor)
                known = self._shared_memory[storage] = None if found is None else (tensor.data_ptr(), found)
            self._checked.add(storage)
        if known is None:
            return None
        first, (key, handle, start) = known
        return key, handle, start + tensor.data_ptr() - first

    def _memory(self, bucket: StagedBucket) -> _Memory:
        """The memory whose turn it is, with room for the bucket."""
        memory = self._memories[self._turn]
        if memory is not None and len(memory.tensor) >= self._used + bucket.size:
            return memory
        self._memories[self._turn] = None
        self._largest = max(self._largest, bucket.limit)
        try:
            # As large as the largest bucket: the copies of several small ones share a call.
            memory = self._memories[self._turn] = _Memory(self._largest, self._device, is_shared=self._can_share)
        except OSError as error:
            raise RolloutError(
                f"rollout.bucket_mib: a bucket of weights needs {self._largest / GIB:.2f} GiB ({error.strerror}). "
                "Lower it, or give the job more memory."
            ) from error
        return memory


class _Memory:
    """Memory of ``num_bytes`` uint8 on a device, and how others open it.

    Raises:
        OSError: there is not so much memory.
    """

    def __init__(self, num_bytes: int, device: str, *, is_shared: bool) -> None:
        import torch

        self.shared: Shared = ("", {}, 0)
        if device == "cpu" and is_shared:
            self._owner = MemoryFile(num_bytes)
            self.tensor, self.shared = self._owner.tensor, self._owner.shared
            return
        try:
            self.tensor = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError as error:
            raise OSError(0, "the GPU's memory is full") from error
        if is_shared:
            shared = share(self.tensor)
            if shared is None:  # torch's allocator maps its memory in pieces (expandable_segments)
                self.tensor = allocate(num_bytes, device)
                shared = share(self.tensor)
            assert shared is not None
            self.shared = shared


def _size(tensors: Sequence[Tensor]) -> int:
    return sum(aligned(tensor.nbytes) for tensor in tensors)
