"""Slurm's compressed lists: ``n[1-3,007],gpu-a[1-2]-b[3-4]`` for node names, ``2(x3),1`` for counts a node.

The order is Slurm's, because ranks follow it: as written, the leftmost bracket varying slowest. Nothing is sorted or dropped, so a name
written twice comes out twice, as from ``scontrol show hostnames``.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator

from rlbatch.api import ConfigError

MAX_NODES = 65_536
"""Largest list that is expanded; also Slurm's limit of one range (MAX_RANGE in src/common/hostlist.c)."""

_TOKEN = re.compile(r"\[[^\[\]]*\]|[^\[\]\s,]+|\s*,\s*|\s+|[\[\]]")
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")
_COUNT = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,252}")

_Element = list[list[str]]
"""The alternatives of each part of a name: ``n[1-2]m`` is ``[["n"], ["1", "2"], ["m"]]``."""


def expand_nodelist(text: str, source: str = "nodelist") -> list[str]:
    """Node names of a Slurm nodelist.

    Args:
        text: Names separated by commas or blanks; ``[1-3,007]`` in a name stands for each of its numbers. A range pads to the width of
            its first number.
        source: What the text is, for messages: a variable's name.

    Raises:
        ConfigError: starts with ``<source>=<text>:``; brackets or ranges that are malformed, a descending range, an empty name, no names,
            characters that no host name has, or more than 65536 names.
    """
    names: list[str] = []
    try:
        for element in _elements(text.strip()):
            _limit(len(names) + math.prod(len(part) for part in element))
            names.extend(map("".join, itertools.product(*element)))
        for name in names:
            if not is_host_name(name):
                raise ValueError(f"{shown(name)} is no host name. Use letters, digits, `-`, `.` and `_`.")
    except ValueError as error:
        raise ConfigError(f"{source}={shown(text)}: {error}") from None
    return names


def expand_tasks_per_node(text: str, source: str = "SLURM_TASKS_PER_NODE") -> list[int]:
    """Counts of each node: ``2(x3),1`` is ``[2, 2, 2, 1]``.

    Raises:
        ConfigError: starts with ``<source>=<text>:``; not of that form, a count or a repetition of 0, or more than 65536 nodes.
    """
    counts: list[int] = []
    try:
        for part in text.split(","):
            match = _COUNT.fullmatch(part.strip())
            count, times = (int(match[1]), int(match[2] or 1)) if match else (0, 0)
            if not count or not times:
                raise ValueError("must be counts above 0 such as 8 or 8(x4),2. Write one for each node.")
            _limit(len(counts) + times)
            counts.extend([count] * times)
    except ValueError as error:
        raise ConfigError(f"{source}={shown(text)}: {error}") from None
    return counts


def is_host_name(text: str) -> bool:
    """Whether a host can have this name. One that starts with ``-`` would be an option of ssh, so it cannot."""
    return _NAME.fullmatch(text) is not None


def _elements(text: str) -> Iterator[_Element]:
    element: _Element = []
    for token in _TOKEN.findall(text):
        if token in ("[", "]"):
            raise ValueError("brackets must be closed and not nested. Write n[1-3,7].")
        if token.startswith("["):
            element.append(_numbers(token[1:-1]))
        elif token.strip(", \t\r\n\v\f"):
            element.append([token])
        else:
            yield _complete(element)
            element = []
    yield _complete(element)


def _complete(element: _Element) -> _Element:
    if not element:
        raise ValueError("a name is empty. Write n1,n2 without a comma before or after.")
    return element


def _numbers(text: str) -> list[str]:
    """``8-10,007`` as 8, 9, 10, 007."""
    numbers: list[str] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        if match is None:
            raise ValueError(f"[{shown(text)}] must hold numbers and ranges. Write [1-3,7].")
        first, last = match[1], match[2] or match[1]
        if int(first) > int(last):
            raise ValueError(f"the range {part.strip()} descends. Write {last}-{first}.")
        _limit(len(numbers) + int(last) - int(first) + 1)
        numbers.extend(str(number).zfill(len(first)) for number in range(int(first), int(last) + 1))
    return numbers


def _limit(count: int) -> None:
    if count > MAX_NODES:
        raise ValueError(f"{count} names, at most {MAX_NODES} are expanded. Is a digit too many in a range?")


def shown(text: str) -> str:
    """A text in a message: printable, and no longer than a line."""
    visible = ascii(text)[1:-1]
    return visible if len(visible) <= 80 else f"{visible[:77]}..."
