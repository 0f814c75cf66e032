"""Allocations of a GPU's memory that other processes can open, by the driver's handles (NVIDIA CUDA driver API, "Memory Management").

torch shares tensors too, but counts readers in files under /dev/shm that a killed process leaves behind, and opens every tensor by itself:
an allocation that torch's allocator has divided among many tensors is opened once here.
"""

from __future__ import annotations

import ctypes
import errno
import os
import weakref
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

OUT_OF_MEMORY = 2
BUFFER_ID, IS_IPC_CAPABLE = 7, 10
"""``CU_POINTER_ATTRIBUTE_BUFFER_ID``, which is never the same for two allocations of a process; ``..._IS_LEGACY_CUDA_IPC_CAPABLE``."""
LAZY_PEER_ACCESS = 1


class IpcHandle(ctypes.Structure):
    """The driver's ``CUipcMemHandle``, by which another process opens an allocation."""

    _fields_ = [("content", ctypes.c_ubyte * 64)]


@dataclass(frozen=True)
class Allocation:
    """One allocation of GPU memory, as the driver made it.

    Attributes:
        key: Its number in this process; never given twice.
        start: Its address.
        num_bytes: Its size.
        handle: Opens it in another process.
    """

    key: int
    start: int
    num_bytes: int
    handle: bytes


def allocation(tensor: Tensor) -> Allocation | None:
    """The allocation in which a tensor on a GPU lies; None: it cannot be opened by others (it is made of mapped pieces)."""
    import torch

    pointer, capable = ctypes.c_uint64(tensor.data_ptr()), ctypes.c_int(0)
    with torch.cuda.device(tensor.device):
        _call("cuPointerGetAttribute", ctypes.byref(capable), IS_IPC_CAPABLE, pointer)
        if not capable.value:
            return None
        start, size, handle = ctypes.c_uint64(0), ctypes.c_size_t(0), IpcHandle()
        _call("cuMemGetAddressRange_v2", ctypes.byref(start), ctypes.byref(size), pointer)
        _call("cuIpcGetMemHandle", ctypes.byref(handle), start)
    return Allocation(allocation_key(tensor), start.value, size.value, bytes(handle.content))


def allocation_key(tensor: Tensor) -> int:
    """The number of the allocation in which a tensor on a GPU lies: quicker to ask than all of it."""
    import torch

    key = ctypes.c_ulonglong(0)
    with torch.cuda.device(tensor.device):
        _call("cuPointerGetAttribute", ctypes.byref(key), BUFFER_ID, ctypes.c_uint64(tensor.data_ptr()))
    return key.value


def allocate(num_bytes: int, device: Any) -> Tensor:
    """[num_bytes] uint8 in an allocation of its own, which others can open; freed with its last tensor.

    Raises:
        OSError: the GPU has not so much memory.
    """
    import torch

    pointer = ctypes.c_uint64(0)
    with torch.cuda.device(device):
        torch.cuda.empty_cache()
        _call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(num_bytes))
        region = _Region(pointer.value, num_bytes)
        weakref.finalize(region, _call, "cuMemFree_v2", pointer)
        return torch.as_tensor(region, device=device)


def open_allocation(handle: bytes, num_bytes: int, device: Any) -> Tensor:
    """[num_bytes] uint8: an allocation of another process, to be closed with ``close_allocation``."""
    import torch

    pointer, given = ctypes.c_uint64(0), IpcHandle()
    ctypes.memmove(given.content, handle, len(given.content))
    with torch.cuda.device(device):
        torch.cuda.current_stream().synchronize()  # makes the device's context this thread's
        _call("cuIpcOpenMemHandle_v2", ctypes.byref(pointer), given, LAZY_PEER_ACCESS)
        return torch.as_tensor(_Region(pointer.value, num_bytes), device=device)


def close_allocation(tensor: Tensor) -> None:
    """Undoes ``open_allocation``; nothing may use the memory any more."""
    import torch

    with torch.cuda.device(tensor.device):
        torch.cuda.synchronize()
        _call("cuIpcCloseMemHandle", ctypes.c_uint64(tensor.data_ptr()))


class _Region:
    """GPU memory in the form in which ``torch.as_tensor`` takes it."""

    def __init__(self, pointer: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {"shape": (num_bytes,), "typestr": "|u1", "data": (pointer, False), "version": 3}


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _call(name: str, *arguments: Any) -> None:
    code = getattr(_driver(), name)(*arguments)
    if code == OUT_OF_MEMORY:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
    if code:
        raise RuntimeError(f"the GPU's driver refuses {name} (CUDA error {code})")
