"""What a rank, its reward host and the host's workers say to each other: frames on sockets, and samples inside them.

What goes down to workers is pickled: it comes from the rank itself. What comes up is JSON: it was made where answers were looked at.
"""

from __future__ import annotations

import pickle
import select
import socket
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from math import prod
from typing import Any, NamedTuple

from rlbatch.api import Prompt, Sample

_HEADER = struct.Struct("!QdQ")
SETUP = 0
"""Number of the first frame, which has the setup, and of its answer; tasks have higher numbers."""
PIECE = 1 << 18
LARGEST_ANSWER = 1 << 26
"""Most bytes of a worker's answer; one that sends more is broken."""


@dataclass(frozen=True)
class Setup:
    """What a reward host is told once.

    Attributes:
        plugins: The config's.
        rewards: Name among the job's -> name and options, of all that it serves.
        seed: The run's seed.
        workers: Tasks at once.
        memory_gib: Memory that a worker may take; None: no limit.
    """

    plugins: Sequence[str]
    rewards: Mapping[str, tuple[str, Mapping[str, Any]]]
    seed: int
    workers: int
    memory_gib: float | None


class Frame(NamedTuple):
    """A message between rank, reward host and worker.

    Attributes:
        number: The task's number.
        seconds: Its deadline, from when it is begun.
        payload: What is in it.
    """

    number: int
    seconds: float
    payload: bytes


class Peer:
    """This end of a socket with frames; it never waits, but in ``send_all``."""

    def __init__(self, end: socket.socket) -> None:
        """The socket is this object's from here on."""
        end.setblocking(False)
        self.socket, self.is_open = end, True
        self._received, self._unsent = bytearray(), bytearray()

    @property
    def has_unsent(self) -> bool:
        """Whether ``send`` left something for ``flush``."""
        return bool(self._unsent) and self.is_open

    def send(self, frame: Frame) -> None:
        """Sends what goes without waiting."""
        self._unsent += _HEADER.pack(frame.number, frame.seconds, len(frame.payload))
        self._unsent += frame.payload
        self.flush()

    def flush(self) -> None:
        """Goes on sending."""
        try:
            while self._unsent:
                with memoryview(self._unsent)[:PIECE] as piece:
                    sent = self.socket.send(piece)
                del self._unsent[:sent]
        except BlockingIOError:
            pass
        except OSError:  # nobody is there
            self.is_open = False

    def send_all(self, frame: Frame) -> None:
        """Sends a frame to a peer that always reads."""
        self.send(frame)
        while self.has_unsent:
            self.wait(select.POLLOUT)
            self.flush()

    def wait(self, event: int = select.POLLIN, seconds: float | None = None) -> None:
        """Waits until there is something to receive, or room to send; works with any number of open files."""
        ready = select.poll()
        ready.register(self.socket, event)
        ready.poll(None if seconds is None else 1000.0 * seconds)

    def receive(self, largest: int | None = None) -> list[Frame]:
        """The frames that have come. ``is_open`` is False once there will be no more, or one is larger than it may be."""
        try:
            while part := self.socket.recv(PIECE):
                self._received += part
            self.is_open = False
        except BlockingIOError:
            pass
        except OSError:
            self.is_open = False
        frames = []
        while len(self._received) >= _HEADER.size:
            number, seconds, size = _HEADER.unpack_from(self._received)
            if largest is not None and size > largest:
                self.is_open = False
                self._received.clear()
                break
            if len(self._received) < _HEADER.size + size:
                break
            frames.append(Frame(number, seconds, bytes(self._received[_HEADER.size : _HEADER.size + size])))
            del self._received[: _HEADER.size + size]
        return frames

    def close(self) -> None:
        """Closes the socket."""
        self.is_open = False
        self.socket.close()


@dataclass(frozen=True)
class _Array:
    """A tensor that is kept as bytes, so that a worker need not import torch."""

    dtype: str
    shape: tuple[int, ...]
    content: bytes

    def tensor(self) -> Any:
        import torch

        flat = torch.frombuffer(bytearray(self.content), dtype=getattr(torch, self.dtype)) if self.content else torch.empty(0)
        return flat.to(getattr(torch, self.dtype)).view(self.shape)


_Shipped = tuple[dict[str, Any], dict[str, _Array]]
"""A sample on its way: its fields, and those of them that are tensors."""


class ShippedSample(Sample):
    """A sample in a worker. Its tensors are made when they are first read: few rewards need them, and importing torch takes seconds."""

    def __getattr__(self, name: str) -> Any:
        """Makes a tensor that is read for the first time; raises AttributeError for any other name."""
        array = self.__dict__.get("_arrays", {}).get(name)
        if array is None:
            raise AttributeError(name)
        self.__dict__[name] = array.tensor()
        return self.__dict__[name]

    @property
    def response_length(self) -> int:
        """Sampled tokens, the stop token included; counted without making a tensor."""
        tokens = self.__dict__.get("token_ids")
        return (prod(self.__dict__["_arrays"]["token_ids"].shape) if tokens is None else len(tokens)) - len(self.prompt.token_ids)


def pack_task(name: str, samples: Sequence[Sample], *, is_held_out: bool = False) -> bytes:
    """A reward's name, samples of one prompt, and whether their answers are wanted too."""
    return pickle.dumps((name, samples[0].prompt, [_shipped(sample) for sample in samples], is_held_out), protocol=5)


def unpack_task(payload: bytes) -> tuple[str, list[Sample], bool]:
    """The same in a worker: copies, whose prompt is the same object in all of them."""
    name, prompt, shipped, is_held_out = pickle.loads(payload)
    return name, [_unpacked(prompt, sample) for sample in shipped], is_held_out


def _shipped(sample: Sample) -> _Shipped:
    import torch

    values, arrays = dict[str, Any](), dict[str, _Array]()
    for name in (known.name for known in fields(sample) if known.name != "prompt"):
        value = getattr(sample, name)
        if hasattr(value, "untyped_storage"):
            content = value.detach().cpu().contiguous()
            # Bytes of any dtype: NumPy has not all of them.
            raw = content.view(-1).view(torch.uint8).numpy().tobytes() if content.numel() else b""
            arrays[name] = _Array(str(content.dtype).removeprefix("torch."), tuple(content.shape), raw)
        else:
            values[name] = value
    return values, arrays


def _unpacked(prompt: Prompt, shipped: _Shipped) -> Sample:
    sample = ShippedSample.__new__(ShippedSample)
    sample.__dict__.update(shipped[0], prompt=prompt, _arrays=shipped[1])
    return sample
