"""Allocates host memory for tensors that leave the accelerator: of exact size and page-locked, freed with its last user.

torch's own page-locked memory is rounded up to powers of two, and what is freed stays with it: a third more, and twice where sizes change.
"""

from __future__ import annotations

import mmap
import os
import socket
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlbatch.api import ConfigError
from rlbatch.launch.preflight.node_facts import GIB
from rlbatch.launch.ranks.host_memory import host_memory

THREADS, PART = 8, 64 * 2**20
"""Number of threads that make pages, and bytes that each makes at a time, so few that torch uses no threads of its own."""


class HostMemory:
    """The host memory that this rank was given.

    Args:
        key: Config key with its value, which messages name as the one that asks.

    Attributes:
        num_bytes: Total size of the memory, bytes.
    """

    def __init__(self, key: str) -> None:
        self._key, self.num_bytes = key, 0

    def take(self, num_bytes: int, *, is_pinned: bool) -> Tensor:
        """Allocates memory near the GPU; see ``MemoryHandles.host_memory``."""
        if num_bytes > host_memory()[1]:
            raise self._missing(num_bytes)
        if not num_bytes:
            return torch.empty(0, dtype=torch.uint8)
        try:
            memory = _Memory(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # the default would share it with forks
        except OSError as error:  # a limit of this process (ulimit -v), or of a system that promises no more than it has
            raise self._missing(num_bytes, f" The system refuses it: {error.strerror}.") from error
        tensor = torch.frombuffer(memory, dtype=torch.uint8)
        if is_pinned and torch.cuda.is_available():
            for advice in (mmap.MADV_DONTFORK, mmap.MADV_HUGEPAGE):  # a fork would copy every page that is locked
                with suppress(OSError):  # of a kernel that has none
                    memory.madvise(advice)
            with _on_cores(near_cores(torch.cuda.get_device_properties(torch.cuda.current_device()))):
                memory.locked = self._lock(tensor)
        self.num_bytes += num_bytes
        return tensor

    def _missing(self, num_bytes: int, reason: str = "") -> ConfigError:
        total, free = host_memory()
        return ConfigError(
            f"{self._key}: what leaves this rank's GPU takes {num_bytes / GIB:.1f} GiB of host memory, {free / GIB:.1f} of "
            f"{total / GIB:.1f} GiB are free on host {socket.gethostname()}.{reason} Offload less, use more GPUs, or ask for more (--mem)."
        )

    def _lock(self, tensor: Tensor) -> int:
        """Creates the pages of a tensor in memory near the cores that this thread runs on, locks them, and returns their address."""
        _make_pages(tensor)
        if code := int(torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0)):
            _, free = host_memory()
            raise ConfigError(
                f"{self._key}: {tensor.nbytes / GIB:.1f} GiB of host memory cannot be page-locked (CUDA error {code}), "
                f"{(self.num_bytes + tensor.nbytes) / GIB:.1f} with what this rank has, {free / GIB:.1f} GiB are free. Use "
                "offload.options.pin_memory=false, or offload less."
            )
        return tensor.data_ptr()


def _make_pages(memory: Tensor) -> None:
    """Creates the pages of memory with several threads, as the system clears each page; locking missing pages would use one thread."""
    with ThreadPoolExecutor(THREADS) as threads:
        list(threads.map(lambda first: memory[first : first + PART : mmap.PAGESIZE].zero_(), range(0, memory.nbytes, PART)))


class _Memory(mmap.mmap):
    """Memory that unlocks its pages before it is freed, as the driver would else refuse to lock others at their address.

    Attributes:
        locked: Address of the locked pages; 0 if they are not locked.
    """

    locked = 0

    def __init__(self, *_: int) -> None:
        self._owner = os.getpid()

    def __del__(self) -> None:
        if self.locked and self._owner == os.getpid() and not sys.is_finalizing():  # a fork has no CUDA; a process that ends lets go
            torch.cuda.cudart().cudaHostUnregister(self.locked)


def near_cores(gpu: Any, devices: Path = Path("/sys/bus/pci/devices")) -> set[int]:
    """Cores of this process that are on a GPU's NUMA node, given the GPU's properties; empty if there are none, or it is not known."""
    with suppress(OSError, ValueError, AttributeError):
        place = f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
        listed = (devices / place / "local_cpulist").read_text().strip()
        ends = [part.partition("-")[::2] for part in listed.split(",")]
        return {core for first, last in ends for core in range(int(first), int(last or first) + 1)} & os.sched_getaffinity(0)
    return set()


@contextmanager
def _on_cores(cores: set[int]) -> Iterator[None]:
    """Runs this thread on these cores alone in the block; on all it may use if there are none, or if that is forbidden."""
    before = os.sched_getaffinity(0)
    with suppress(OSError):  # some containers forbid it
        os.sched_setaffinity(0, cores or before)
    try:
        yield
    finally:
        with suppress(OSError):
            os.sched_setaffinity(0, before)
