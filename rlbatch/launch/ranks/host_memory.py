"""The host's memory as this process may use it: the machine's, or that of the control groups around it, of both versions of Linux's."""

from __future__ import annotations

import re
import resource
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from rlbatch.api import ConfigError
from rlbatch.foreign_code import text

ROOT, MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
CACHES = ("inactive_file", "active_file")
"""Files' pages, read once and more often: the system takes both back when memory is needed."""
ADDRESSES_GIB = 3.0
"""GiB of addresses that a rank needs: one of the embedded model takes 2.3, mostly stacks and libraries that are never filled."""
_REFUSED = re.compile(r"annot allocate memory(?! in static TLS)|can't allocate memory|bad_alloc")


@dataclass(frozen=True)
class _Names:
    """What a version of control groups calls its files, and how names of a group and those below it begin in ``memory.stat``."""

    limit: str
    used: str
    events: str
    stat: str


_VERSIONS = {
    "0::": ("", _Names("memory.max", "memory.current", "memory.events", "")),
    "memory:": ("memory", _Names("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.oom_control", "total_")),
}
"""Versions of control groups: what ends the beginning of their line in /proc/self/cgroup -> their mount in ``ROOT``, and names of files."""


def host_memory() -> tuple[int, int]:
    """Total and free bytes: the machine's, or those of the tightest control group around this process."""
    memory = psutil.virtual_memory()
    total, free = memory.total, memory.available
    for folder, names in _control_groups():
        with suppress(OSError, ValueError):  # `max`: no limit
            limit = int((folder / names.limit).read_text())
            used = int((folder / names.used).read_text()) - sum(_number(folder / "memory.stat", names.stat + cache) for cache in CACHES)
            total, free = min(total, limit), min(free, limit, max(0, limit - used))
    return total, free


def none_left() -> str:
    """Says, for a message, that no memory was left, and how much there is in all."""
    return f"of {host_memory()[0] / 2**30:.1f} GiB of memory none was left"


def address_limit() -> str:
    """The limit on a process's address space, in words; empty if there is none."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return "" if limit == resource.RLIM_INFINITY else f"{limit / 2**30:.1f} GiB of addresses (ulimit -v)"


def check_addresses() -> None:
    """Refuses a limit with which the libraries' threads could not all be started: where torch cannot start one it may wait for ever.

    Raises:
        ConfigError: with the limit.
    """
    if address_limit() and resource.getrlimit(resource.RLIMIT_AS)[0] < ADDRESSES_GIB * 2**30:
        raise ConfigError(
            f"{address_limit()} are too few: a rank needs {ADDRESSES_GIB:g} with its libraries and their threads, beside what "
            "the model takes. Raise it, best to unlimited."
        )


def refused(error: BaseException) -> str:
    """What was said where the system refused this process memory; empty: something else went wrong."""
    said = " ".join(text(error).split()).rpartition("DefaultCPUAllocator: ")[2]
    is_thread = "can't start new thread" in said and address_limit()  # else there are too many
    return said or type(error).__name__ if isinstance(error, MemoryError) or is_thread or _REFUSED.search(said) else ""


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
    """Folders of the control groups around this process, from the inside; the last is the only one that a container sees."""
    with suppress(OSError):
        for line in MEMBERSHIP.read_text(encoding="utf-8").splitlines():
            for start, (mount, names) in _VERSIONS.items():
                _, is_one, path = line.partition(start)
                root = ROOT / mount
                folder = root / path.lstrip("/")
                if is_one:
                    yield from ((each, names) for each in (folder, *folder.parents) if each.is_relative_to(root))
