"""Frames between a rank and its engine host: two lengths, a JSON header, raw bytes. No pickles."""

from __future__ import annotations

import json
import socket
import struct
import sys
from array import array
from collections.abc import Iterable, Mapping
from typing import Any

LENGTHS = struct.Struct("!IQ")
"""Bytes of the header, bytes of the payload."""

Header = Mapping[str, Any]
Frame = tuple[dict[str, Any], bytearray]


class Refused(ValueError):
    """What an engine cannot do, in words for users: ``<key>=<value>: <what must hold>. <fix>.`` They need neither traceback nor log."""


def encode(header: Header, payload: bytes = b"") -> bytes:
    """A frame as bytes."""
    text = json.dumps(header).encode()
    return LENGTHS.pack(len(text), len(payload)) + text + payload


def read_frame(connection: socket.socket) -> Frame | None:
    """The next frame; None: the other side is gone."""
    lengths = _read(connection, LENGTHS.size)
    if lengths is None:
        return None
    header_bytes, payload_bytes = LENGTHS.unpack(lengths)
    header, payload = _read(connection, header_bytes), _read(connection, payload_bytes)
    return None if header is None or payload is None else (json.loads(header), payload)


def error_text(error: BaseException) -> str:
    """An error's own words, and those of what caused it; what to do where a module is missing."""
    words = [str(error) or type(error).__name__]
    while error.__cause__ is not None:
        error = error.__cause__
        words.append(str(error) or type(error).__name__)
    told = " <- ".join(dict.fromkeys(words))
    return f"{told}. Install the engine anew for {sys.executable}." if isinstance(error, ImportError) else told


def pack_ints(rows: Iterable[Iterable[int]]) -> bytes:
    """Rows of 32-bit integers, one after the other."""
    packed = array("i")
    for row in rows:
        packed.extend(row)
    return packed.tobytes()


def unpack_ints(payload: bytes | bytearray, lengths: Iterable[int]) -> list[list[int]]:
    """What ``pack_ints`` packed, given the length of each row."""
    values, rows, start = array("i", payload), [], 0
    for length in lengths:
        rows.append(values[start : start + length].tolist())
        start += length
    return rows


def _read(connection: socket.socket, size: int) -> bytearray | None:
    content = bytearray(size)
    view = memoryview(content)
    while view:
        try:
            count = connection.recv_into(view)
        except OSError:  # reset: the other side was killed
            return None
        if count == 0:
            return None
        view = view[count:]
    return content
