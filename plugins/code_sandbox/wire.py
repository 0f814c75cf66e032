"""Values as JSON: plain data by value, all else as a number under which its owner keeps it. It is copied into jails."""

from __future__ import annotations

import json
import sys
from collections import deque
from collections.abc import Callable, Mapping
from decimal import Decimal
from fractions import Fraction
from typing import Any, BinaryIO

MOST_CHARACTERS = 64 * 2**20
"""Most characters of a line between tester and program."""
if hasattr(sys, "set_int_max_str_digits"):
    sys.set_int_max_str_digits(0)


def encode(value: Any, keep: Callable[[Any], int]) -> Any:
    """A value as JSON. Subclasses of plain types become plain, so that one that compares as it likes compares as what it holds."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return {"i": hex(int.__index__(value))} if abs(int.__index__(value)) >> 60 else int.__index__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, str):
        return "".join([str.__str__(value)])
    if isinstance(value, complex):
        return {"c": [value.real, value.imag]}
    if isinstance(value, (bytes, bytearray)):
        return {"b": bytes(value).hex()}
    if isinstance(value, dict):
        return {"d": [[encode(key, keep), encode(item, keep)] for key, item in dict.items(value)]}
    kinds: tuple[tuple[type, str], ...] = ((list, "l"), (tuple, "t"), (set, "s"), (frozenset, "f"), (deque, "q"))
    for kind, name in kinds:
        if isinstance(value, kind):
            return {name: [encode(item, keep) for item in kind(value)]}
    if isinstance(value, range):
        return {"r": [value.start, value.stop, value.step]}
    if isinstance(value, (Decimal, Fraction)):
        return {"D" if isinstance(value, Decimal) else "F": str(value)}
    if type(value).__module__ == "numpy" and getattr(value, "shape", None) == () and hasattr(value, "item"):
        return encode(value.item(), keep)
    return {"o": keep(value)}


def decode(value: Any, kept: Callable[[int], Any]) -> Any:
    """The value of its JSON; ``kept`` gives the object that a number stands for."""
    if not isinstance(value, dict):
        return value
    ((name, held),) = value.items()
    if name in BY_ITEMS:
        return BY_ITEMS[name](decode(item, kept) for item in held)
    if name == "d":
        return {decode(key, kept): decode(item, kept) for key, item in held}
    return kept(int(held)) if name == "o" else BY_TEXT[name](held)


BY_ITEMS: Mapping[str, Callable[[Any], Any]] = {"l": list, "t": tuple, "s": set, "f": frozenset, "q": deque}
BY_TEXT: Mapping[str, Callable[[Any], Any]] = {
    "i": lambda held: int(held, 16),
    "c": lambda held: complex(*held),
    "b": bytes.fromhex,
    "r": lambda held: range(*held),
    "D": Decimal,
    "F": Fraction,
}


class Line:
    """A line of JSON in each direction."""

    def __init__(self, heard: BinaryIO, told: BinaryIO) -> None:
        """Makes a line of two streams."""
        self.heard, self.told = heard, told

    def write(self, message: Any) -> None:
        """Sends a message."""
        self.told.write(json.dumps(message).encode() + b"\n")
        self.told.flush()

    def read(self) -> Any:
        """The next message; raises EOFError if there is none."""
        line = self.heard.readline(MOST_CHARACTERS)
        if not line.endswith(b"\n"):
            raise EOFError("the other side has ended")
        return json.loads(line)
