"""Changes values in the memory of other processes, behind the back of whoever computes with them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import psutil
import torch

LARGEST = 2**30
"""Bytes of a mapping that is looked through."""


Place = tuple[int, int]
"""A process and an address in it."""


def places(host: int, rows: Sequence[torch.Tensor]) -> list[list[Place]]:
    """Wherever a process and its children have each of some values (rows of matrices, say)."""
    found: list[list[Place]] = [[] for _ in rows]
    for pid in [host, *(child.pid for child in psutil.Process(host).children(recursive=True))]:
        for start, content in _memory(pid):
            for known, row in zip(found, rows, strict=True):
                place = content.find(_bytes(row))
                while place >= 0:
                    known.append((pid, start + place))
                    place = content.find(_bytes(row), place + 1)
    return found


@contextmanager
def one_bit_changed(found: Sequence[Place], values: torch.Tensor) -> Iterator[None]:
    """In the block, of the values one differs in its last bit, in all of their places."""
    other = values.clone()
    other.view(torch.uint8)[4] ^= 1
    assert _replace(found, _bytes(values), _bytes(other)) > 0
    yield
    assert _replace(found, _bytes(other), _bytes(values)) > 0


def _bytes(values: torch.Tensor) -> bytes:
    return values.contiguous().view(torch.uint8).numpy().tobytes()


def _memory(pid: int) -> Iterator[tuple[int, bytes]]:
    """What a process may write to, mapping by mapping, with its address."""
    with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        for line in maps:
            start, end = (int(number, 16) for number in line.split()[0].split("-"))
            if line.split()[1].startswith("rw") and end - start < LARGEST:
                with suppress(OSError, ValueError):  # of devices
                    memory.seek(start)
                    yield start, memory.read(end - start)


def _replace(found: Sequence[Place], before: bytes, after: bytes) -> int:
    """Writes where that is still what it was; returns how often it was done."""
    count = 0
    for pid, place in found:
        with suppress(OSError), open(f"/proc/{pid}/mem", "r+b", buffering=0) as memory:  # a buffer may be gone
            memory.seek(place)
            if memory.read(len(before)) == before:
                memory.seek(place)
                count += memory.write(after) == len(after)
    return count
