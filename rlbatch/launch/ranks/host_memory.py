"""The host's memory as this process may use it: the machine's, or that of the control groups around it, of both versions of Linux's."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT, MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


@dataclass(frozen=True)
class _Names:
    """What a version of control groups calls its files, and in them what the system takes back when it is needed."""

    limit: str
    used: str
    events: str
    cache: str


_VERSIONS = {
    "0::": ("", _Names("memory.max", "memory.current", "memory.events", "inactive_file")),
    "memory:": ("memory", _Names("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.oom_control", "total_inactive_file")),
}
"""End of its line's beginning in /proc/self/cgroup -> where it is mounted in ``ROOT``, and its names."""


def host_memory() -> tuple[int, int]:
    """Total and free bytes: the machine's, or those of the tightest control group around this process."""
    memory = psutil.virtual_memory()
    total, free = memory.total, memory.available
    for folder, names in _control_groups():
        with suppress(OSError, ValueError):  # `max`: no limit
            limit = int((folder / names.limit).read_text())
            used = int((folder / names.used).read_text()) - _number(folder / "memory.stat", names.cache)
            total, free = min(total, limit), min(free, max(0, limit - used))
    return total, free


def oom_kills() -> int:
    """How many processes around this one the system has ended so far because there was no memory: of its control group, or else of the
    machine.
    """
    for folder, names in _control_groups():
        with suppress(OSError):
            return _number(folder / names.events, "oom_kill")
    with suppress(OSError):
        return _number(Path("/proc/vmstat"), "oom_kill")
    return 0


def _number(path: Path, name: str) -> int:
    match = re.search(rf"^{name} (\d+)$", path.read_text(encoding="ascii"), re.MULTILINE)
    return int(match[1]) if match else 0


def _control_groups() -> Iterator[tuple[Path, _Names]]:
    """The folders of those around this process, from the inside; the last is the only one that a container sees."""
    with suppress(OSError):
        for line in MEMBERSHIP.read_text(encoding="utf-8").splitlines():
            for start, (mount, names) in _VERSIONS.items():
                _, is_one, path = line.partition(start)
                root = ROOT / mount
                folder = root / path.lstrip("/")
                if is_one:
                    yield from ((each, names) for each in (folder, *folder.parents) if each.is_relative_to(root))
