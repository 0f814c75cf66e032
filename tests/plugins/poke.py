"""Changes values in the memory of other processes, behind the back of whoever computes with them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil
import torch

LARGEST = 2**30
"""Bytes of a mapping that is looked through."""


@contextmanager
def one_bit_changed(host: int, values: torch.Tensor) -> Iterator[None]:
    """In the block, of the values (a row of a matrix, say) wherever the process and its children have them, one differs in its last bit."""
    other = values.clone()
    other.view(torch.uint8)[4] ^= 1
    processes = [host, *(child.pid for child in psutil.Process(host).children(recursive=True))]
    assert sum(_replace(pid, _bytes(values), _bytes(other)) for pid in processes) > 0
    yield
    assert sum(_replace(pid, _bytes(other), _bytes(values)) for pid in processes) > 0


def _bytes(values: torch.Tensor) -> bytes:
    return values.contiguous().view(torch.uint8).numpy().tobytes()


def _replace(pid: int, before: bytes, after: bytes) -> int:
    """How often it was done."""
    count = 0
    with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "r+b", buffering=0) as memory:
        for line in maps:
            start, end = (int(number, 16) for number in line.split()[0].split("-"))
            if line.split()[1].startswith("rw") and end - start < LARGEST:
                with suppress(OSError, ValueError):  # of devices
                    memory.seek(start)
                    content = memory.read(end - start)
                    place = content.find(before)
                    while place >= 0:
                        memory.seek(start + place)
                        count += memory.write(after) == len(after)
                        place = content.find(before, place + 1)
    return count
