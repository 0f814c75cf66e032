"""Changes values in the memory of other processes, behind the back of whoever computes with them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
    found = [(pid, place) for pid in processes for place in _places(pid, _bytes(values))]
    assert _replace(found, _bytes(values), _bytes(other)) > 0
    yield
    assert _replace(found, _bytes(other), _bytes(values)) > 0


def _bytes(values: torch.Tensor) -> bytes:
    return values.contiguous().view(torch.uint8).numpy().tobytes()


def _places(pid: int, content: bytes) -> Iterator[int]:
    """Where it is in the memory of a process."""
    with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        for line in maps:
            start, end = (int(number, 16) for number in line.split()[0].split("-"))
            if line.split()[1].startswith("rw") and end - start < LARGEST:
                with suppress(OSError, ValueError):  # of devices
                    memory.seek(start)
                    whole = memory.read(end - start)
                    place = whole.find(content)
                    while place >= 0:
                        yield start + place
                        place = whole.find(content, place + 1)


def _replace(found: Sequence[tuple[int, int]], before: bytes, after: bytes) -> int:
    """Writes where that is still what it was; returns how often it was done."""
    count = 0
    for pid, place in found:
        with suppress(OSError), open(f"/proc/{pid}/mem", "r+b", buffering=0) as memory:  # a buffer may be gone
            memory.seek(place)
            if memory.read(len(before)) == before:
                memory.seek(place)
                count += memory.write(after) == len(after)
    return count
