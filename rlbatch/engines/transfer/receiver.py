"""A worker's end of a weight sync: the tensors that a call brings, in memory that the trainer's ranks share or in a broadcast."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rlbatch.engines.transfer.buckets import views
from rlbatch.engines.transfer.shared_memory import OpenMemories, device_identity
from rlbatch.engines.transfer.weight_group import WeightGroup

if TYPE_CHECKING:
    from torch import Tensor

EVERY_DEVICE = "*"


class WeightReceiver:
    """Receives weights in one worker.

    Attributes:
        lasting: Names of the last call's tensors that may be read until the sync is over.
        all_last: Whether these are all of them.
    """

    def __init__(self, device: Any) -> None:
        self._device, self._identity = device, device_identity(device)
        self._memories = OpenMemories(device)
        self._known: dict[str, dict[str, Any]] = {}
        self._views: dict[str, tuple[tuple[int, ...], list[tuple[str, Tensor]]]] = {}
        self._came: set[str] = set()
        self.lasting: frozenset[str] = frozenset()
        self.all_last = False
        self._group: WeightGroup | None = None
        self._buffer: Tensor | None = None

    def join(self, group: WeightGroup) -> None:
        """Takes weights over a group from here on."""
        self._group = group

    def tensors(self, devices: Mapping[str, Mapping[str, Any]]) -> tuple[str, list[tuple[str, Tensor]]]:
        """The tensors of a call, which may be read until it is answered.

        Args:
            devices: Part of the call's payload: for each device, or all, ``key`` and, unless the last sync had it, what it stands for.

        Returns:
            A key, and names and tensors. The same key means tensors in the same places.
        """
        said = devices.get(self._identity) or devices.get(EVERY_DEVICE)
        if said is None:
            raise RuntimeError(f"weight sync: there is nothing for {self._identity}, only for {', '.join(devices)}")
        key = said["key"]
        if "locations" in said:
            lasting = frozenset(said["lasting"])
            names = frozenset(place["name"] for place in said["locations"] if place["memory"] in lasting)
            self._known[key] = {**said, "lasting": names, "all_last": len(names) == len(said["locations"])}
            self._views.pop(key, None)
        content = self._known[key]
        self.lasting, self.all_last = content["lasting"], content["all_last"]
        memories = {name: self._memories.open(name, handle) for name, handle in content["memories"].items()}
        if "broadcast" in content:
            assert self._group is not None
            memories[""] = self._receiving(content["broadcast"])
            self._group.receive(memories[""])
        self._came.add(key)
        where = tuple(memory.data_ptr() for memory in memories.values())
        if key not in self._views or self._views[key][0] != where:
            self._views[key] = where, list(views(memories, content["locations"]))
        return f"{key} {where}", self._views[key][1]

    def finish(self) -> None:
        """Ends a sync: forgets what came before it, and gives back the memory for broadcasts."""
        self._known = {key: content for key, content in self._known.items() if key in self._came}
        self._views = {key: found for key, found in self._views.items() if key in self._came and "broadcast" not in self._known[key]}
        self._memories.keep({memory for content in self._known.values() for memory in content["memories"]})
        self._came, self._buffer, self.lasting = set(), None, frozenset()

    def _receiving(self, size: int) -> Tensor:
        """Memory for a broadcast, [size] uint8: the start of a buffer that is the same during a sync unless it has to grow."""
        import torch

        if self._buffer is None or len(self._buffer) < size:
            self._buffer = torch.empty(size, dtype=torch.uint8, device=self._device)
        return self._buffer[:size]
