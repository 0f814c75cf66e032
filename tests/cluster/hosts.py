"""Lines in /etc/hosts that belong to a test, marked so that exactly they are removed again."""

from __future__ import annotations

import fcntl
import random
import string
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

HOSTS = Path("/etc/hosts")


def unused_prefix(start: str) -> str:
    """A start of host names that no other cluster has that is up, or that was killed and left its lines."""
    return start + "".join(random.SystemRandom().choices(string.ascii_lowercase, k=3))


def add_hosts(owner: str, addresses: Mapping[str, str]) -> None:
    """Appends ``name -> address`` lines.

    Raises:
        RuntimeError: a name is there already, as something else.
    """
    with _edited() as lines:
        known = {name for line in lines for name in line.partition("#")[0].split()[1:]}
        if taken := sorted(known & set(addresses)):
            raise RuntimeError(f"{HOSTS}: has {', '.join(taken)} already. Is another cluster up?")
        lines.extend(f"{address} {name} # {owner}" for name, address in addresses.items())


def remove_hosts(owner: str) -> None:
    """Removes the owner's lines."""
    with _edited() as lines:
        lines[:] = [line for line in lines if not line.endswith(f"# {owner}")]


@contextmanager
def _edited() -> Iterator[list[str]]:
    """The lines, written back at the end into the same file: containers mount it, so that it cannot be replaced. It is never empty
    meanwhile: whatever runs beside the test looks names up in it.
    """
    with HOSTS.open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        lines = file.read().splitlines()
        yield lines
        file.seek(0)
        file.write("".join(f"{line}\n" for line in lines))
        file.truncate()
