"""Memory that two processes see: a rank writes weights into it, an engine's workers read them. On the host it has no name.

A memory file (``memfd_create``) is reached through ``/proc/<pid>/fd/<number>`` by processes of the same user, and vanishes with its last
one: nothing is left behind after a crash, and the size of /dev/shm does not limit it. On a GPU whole allocations are opened.
"""

from __future__ import annotations

import itertools
import mmap
import os
import weakref
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from rlbatch.engines.transfer.cuda_memory import allocation, allocation_key, close_allocation, open_allocation

if TYPE_CHECKING:
    from torch import Tensor

Handle = dict[str, Any]
"""What opens memory in another process; JSON."""

Shared = tuple[str, Handle, int]
"""Memory's key (no other memory of the process ever has it), its handle, and where in it something starts (bytes)."""

_numbers = itertools.count(1)


class MemoryFile:
    """Host memory of this process that another one can open, as long as this object lives.

    Attributes:
        tensor: [num_bytes] uint8.
        shared: Its key and handle.

    Raises:
        OSError: there is not so much memory.
    """

    def __init__(self, num_bytes: int) -> None:
        import torch

        descriptor = os.memfd_create("rlbatch-weights", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, descriptor)
        os.posix_fallocate(descriptor, 0, num_bytes)  # else writing could end the process
        self.tensor: Tensor = torch.frombuffer(mmap.mmap(descriptor, num_bytes), dtype=torch.uint8)
        self.shared: Shared = (_key(next(_numbers)), {"path": f"/proc/{os.getpid()}/fd/{descriptor}"}, 0)
        _memory_files[self.tensor.data_ptr()] = self


_memory_files: weakref.WeakValueDictionary[int, MemoryFile] = weakref.WeakValueDictionary()
"""The ``MemoryFile`` objects of this process, by the address of their memory."""


def share(tensor: Tensor) -> Shared | None:
    """How others open the memory of a tensor; None: they cannot."""
    if tensor.device.type == "cpu":
        start = tensor.untyped_storage().data_ptr()
        memory = _memory_files.get(start)
        return None if memory is None else (*memory.shared[:2], tensor.data_ptr() - start)
    found = allocation(tensor)
    if found is None:
        return None
    handle = {"ipc": found.handle.hex(), "bytes": found.num_bytes}
    return _key(found.key), handle, tensor.data_ptr() - found.start


def is_still(tensor: Tensor, key: str) -> bool:
    """Whether a tensor lies in the memory with this key: what ``share`` said of that holds."""
    if tensor.device.type == "cpu":
        memory = _memory_files.get(tensor.untyped_storage().data_ptr())
        return memory is not None and memory.shared[0] == key
    return _key(allocation_key(tensor)) == key


def _key(number: int) -> str:
    return f"{os.getpid()}-{number}"


class OpenMemories:
    """Memory of other processes that this one has open, by its key."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self._tensors: dict[str, Tensor] = {}

    def open(self, key: str, handle: Mapping[str, Any]) -> Tensor:
        """The memory with this key, [bytes] uint8; it is opened only once."""
        import torch

        if key not in self._tensors:
            if "path" in handle:
                with open(handle["path"], "r+b") as file:
                    self._tensors[key] = torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)
            else:
                self._tensors[key] = open_allocation(bytes.fromhex(handle["ipc"]), handle["bytes"], self._device)
        return self._tensors[key]

    def keep(self, keys: Collection[str]) -> None:
        """Closes all others; nothing may use their memory any more."""
        for key in [key for key in self._tensors if key not in keys]:
            tensor = self._tensors.pop(key)
            if tensor.device.type != "cpu":
                close_allocation(tensor)


def device_identity(device: Any) -> str:
    """Tells a GPU from the others of the host, whatever number it has in a process; ``cpu`` for the host's memory."""
    import torch

    return "cpu" if torch.device(device).type == "cpu" else str(torch.cuda.get_device_properties(device).uuid)
