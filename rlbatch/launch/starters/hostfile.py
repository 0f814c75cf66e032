"""Hostfiles: which hosts a job may use, and how many ranks each takes.

Launchers disagree on the format, and some drop what they cannot read: one reads `h slots=two` as an error, one as no host at all. So every
style is read here, strictly, and each launcher is given a file of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from ipaddress import IPv6Address
from typing import NoReturn

from rlbatch.api import ConfigError
from rlbatch.launch.ranks.nodelist import MAX_NODES, expand_nodelist, is_host_name, shown

MAX_SLOTS = 4096
"""More ranks than any node takes: what is above is a typing error."""

_SLOTS = ("slots", "slot", "count", "cpu")
"""Open MPI's names of the same thing; `slot` is what other RL launchers write."""
_MAX_SLOTS = ("max_slots", "slots_max")
_IGNORED = ("ifhn",)
"""MPICH's hint for an interface."""
_COMMENT = re.compile(r"#[^\n]*|//[^\n]*|/\*.*?\*/", re.DOTALL)
_BRACKETED = re.compile(r"\[([^\[\]]*:[^\[\]]*)\](?::(.*))?")


@dataclass(frozen=True)
class Host:
    """A host that the job may use.

    Attributes:
        name: The name as written, with ``user@`` if that was there; an IPv6 address without brackets.
        slots: Ranks that it takes. None: the file does not say, and nobody said how many GPUs a node has.
    """

    name: str
    slots: int | None


@dataclass(frozen=True)
class _Entry:
    line: int
    host: str
    slots: int | None
    most: int | None


def parse_hostfile(text: str, source: str = "hostfile", gpus_per_node: int | None = None) -> list[Host]:
    """Hosts of a hostfile, in its order.

    A line names a host: ``host slots=8`` (also ``slot=``, ``count=``, ``cpu=``, with ``max_slots=``), ``host:8``, or ``host``, which has
    ``gpus_per_node`` slots; but if a bare host is repeated, as in PBS_NODEFILE, then each bare line is one slot. ``n[1-4]`` stands for
    four hosts. Comments (``#``, ``//``, ``/* */``), blank lines, tabs, CRLF and a byte-order mark are skipped.

    Raises:
        ConfigError: starts with ``<source>:<line>:``; zero, negative or non-numeric slots, more than max_slots, an unknown key, an extra
            word, what is no host name, a host twice of which one has slots, or no host.
    """
    entries: dict[str, list[_Entry]] = {}
    for entry in _entries(text, source):
        same = entries.setdefault(_identity(entry.host), [])
        if same and (entry.slots is not None or same[0].slots is not None):
            _refuse(source, entry.line, f"{entry.host} is also in line {same[0].line}. Write a host once, with all its slots")
        if len(entries) > MAX_NODES:
            _refuse(source, entry.line, f"more than {MAX_NODES} hosts. Give a file of the hosts of this job")
        same.append(entry)
    if not entries:
        _refuse(source, 1, "names no host. Write one a line, `host slots=8`")
    repeated = any(len(same) > 1 for same in entries.values())
    return [_host(same, 1 if repeated else gpus_per_node, source) for same in entries.values()]


def _host(same: list[_Entry], bare: int | None, source: str) -> Host:
    first = same[0]
    slots = len(same) if len(same) > 1 else bare if first.slots is None else first.slots
    if slots is not None and first.most is not None and slots > first.most:
        _refuse(source, first.line, f"slots={slots} is more than max_slots={first.most}. Correct one of them")
    return Host(first.host, slots)


def _entries(text: str, source: str) -> Iterator[_Entry]:
    text = text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
    text = _COMMENT.sub(lambda comment: " " + "\n" * comment[0].count("\n"), text)
    for number, line in enumerate(text.split("\n"), start=1):
        # Open MPI allows blanks around the equals sign.
        words = " ".join(line.split()).replace(" =", "=").replace("= ", "=").split()
        if words:
            yield from _entry(words, source, number)


def _entry(words: list[str], source: str, line: int) -> Iterator[_Entry]:
    hosts, count = _hosts(words[0], source, line)
    slots = None if count is None else _number("slots", count, source, line)
    most = None
    for word in words[1:]:
        key, equals, value = word.partition("=")
        name = key.lower().replace("-", "_")
        if not equals:
            _refuse(source, line, f"extra word `{shown(word)}`. Write one host a line, `{hosts[0]} slots=8`")
        if name in _SLOTS and slots is None:
            slots = _number(key, value, source, line)
        elif name in _MAX_SLOTS and most is None:
            most = _number(key, value, source, line)
        elif name in _SLOTS or name in _MAX_SLOTS:
            _refuse(source, line, f"`{shown(word)}` says again how many slots. Say it once")
        elif name not in _IGNORED:
            _refuse(source, line, f"unknown key `{shown(key)}`. Known: {', '.join(_SLOTS + _MAX_SLOTS + _IGNORED)}")
    for host in hosts:
        yield _Entry(line, host, slots, most)


def _hosts(word: str, source: str, line: int) -> tuple[list[str], str | None]:
    """Hosts and slots of ``host``, ``host:8``, ``user@host``, ``n[1-4]:8``, ``fe80::1`` or ``[fe80::1]:8``."""
    user, at, rest = word.rpartition("@")
    if at and not is_host_name(user):
        _refuse(source, line, f"`{shown(word)}` has no user before the @. Write user@host")
    bracketed = _BRACKETED.fullmatch(rest)
    address, count = (bracketed[1], bracketed[2]) if bracketed else (rest, None)
    if _ipv6(address):
        return [user + at + address], count
    name, colon, count = rest.partition(":")
    names = [name]
    if "[" in name and "," not in re.sub(r"\[[^\]]*\]", "", name):
        names = expand_nodelist(name, f"{source}:{line}: host")
    if bracketed or ":" in count or not all(map(is_host_name, names)):
        _refuse(source, line, f"`{shown(word)}` is no host. Write one host a line: a name, an address, or n[1-4]")
    return [user + at + name for name in names], count if colon else None


def _number(key: str, text: str, source: str, line: int) -> int:
    if not re.fullmatch("[0-9]{1,9}", text) or not 1 <= int(text) <= MAX_SLOTS:
        _refuse(source, line, f"{shown(key)}={shown(text)}: must be a number from 1 to {MAX_SLOTS}. Give the ranks that the host takes")
    return int(text)


def _identity(host: str) -> str:
    """A host's identity, the same for two ways to write one host."""
    name = host.rpartition("@")[2].lower().rstrip(".")
    return str(_ipv6(name) or name)


def _ipv6(text: str) -> IPv6Address | None:
    try:
        return IPv6Address(text) if text.isascii() else None
    except ValueError:
        return None


def _refuse(source: str, line: int, reason: str) -> NoReturn:
    raise ConfigError(f"{source}:{line}: {reason}.")
