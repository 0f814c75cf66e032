"""Memory that two processes see: a rank writes weights into it, an engine's workers read them. On the host it has no name.

A memory file (``memfd_create``) is reached through ``/proc/<pid>/fd/<number>`` by processes of the same user, and vanishes with its last
one: nothing is left behind after a crash, and the size of /dev/shm does not limit it. On a GPU the memory is reached by a CUDA IPC handle.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

IPC_FIELDS = (
    "device",
    "handle",
    "bytes",
    "offset",
    "counter_handle",
    "counter_offset",
    "event_handle",
    "needs_event",
)
"""What ``torch.UntypedStorage._share_cuda_`` returns and ``_new_shared_cuda`` takes, in this order."""

Handle = dict[str, Any]


class SharedMemory:
    """Memory of this process that another one can open.

    Args:
        num_bytes: Its size.
        device: ``cpu`` or ``cuda:<index>``.

    Attributes:
        tensor: [num_bytes] uint8.
        handle: What ``open_handle`` takes in another process; JSON.

    Raises:
        OSError: there is not so much memory.
    """

    def __init__(self, num_bytes: int, device: str) -> None:
        import torch

        self.tensor: Tensor
        self.handle: Handle
        self._descriptor: int | None = None
        if device != "cpu":
            self.tensor = torch.empty(num_bytes, dtype=torch.uint8, device=device)
            self.handle = _ipc_handle(self.tensor)
            return
        self._descriptor = os.memfd_create("rlbatch-weights", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(self._descriptor, 0, num_bytes)  # else writing could end the process
            self.tensor = torch.frombuffer(mmap.mmap(self._descriptor, num_bytes), dtype=torch.uint8)
        except OSError:
            self.close()
            raise
        self.handle = {"path": f"/proc/{os.getpid()}/fd/{self._descriptor}"}

    def close(self) -> None:
        """Nobody can open it any more; who has, keeps it."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def open_handle(handle: Mapping[str, Any], device: Any) -> Tensor:
    """The same memory in another process.

    Args:
        handle: Of a ``SharedMemory``.
        device: ``torch.device`` of this process on which a GPU's memory appears.
    """
    import torch

    if "path" in handle:
        with open(handle["path"], "r+b") as file:
            return torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)
    values = {name: bytes.fromhex(value) if isinstance(value, str) else value for name, value in handle["ipc"].items()}
    values["device"] = device.index
    # Undocumented, but what torch.multiprocessing itself passes through pickle.
    storage = torch.UntypedStorage._new_shared_cuda(*(values[name] for name in IPC_FIELDS))
    return torch.tensor([], dtype=torch.uint8, device=device).set_(storage)


def device_identity(device: Any) -> str:
    """Tells a GPU from the others of the host, whatever number it has in a process; ``cpu`` for the host's memory."""
    import torch

    return "cpu" if torch.device(device).type == "cpu" else str(torch.cuda.get_device_properties(device).uuid)


def _ipc_handle(tensor: Tensor) -> Handle:
    values = dict(zip(IPC_FIELDS, tensor.untyped_storage()._share_cuda_(), strict=True))
    return {"ipc": {name: value.hex() if isinstance(value, bytes) else value for name, value in values.items()}}
