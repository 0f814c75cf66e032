"""Faults of an engine that its plugin works around, each until a release without it: what an entry of such a registry is, and its use."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

Release = tuple[int, ...]
BACKLOG = 2048
"""Connections that may wait, as torch has it."""


@dataclass(frozen=True)
class Workaround:
    """One fault of an engine, and what works around it.

    Attributes:
        apply: Mends it in this process; its name is the workaround's.
        first: First release for which it is applied.
        last: Last release in which the fault was seen: it is applied up to it, later ones are warned about.
        symptom: What happens without it.
        link: Where upstream has, or discusses, the code.
        cpu_only: Whether only the CPU backend has the fault.
        is_mended: Whether the release after ``last`` is without the fault: nobody is warned about later ones.
    """

    apply: Callable[[], None]
    first: Release
    last: Release
    symptom: str
    link: str
    cpu_only: bool = False
    is_mended: bool = False

    @property
    def name(self) -> str:
        """The workaround's name in messages."""
        return self.apply.__name__


def apply_those_for(
    version: str, release: Release, registry: Sequence[Workaround], skipped_by: str, applied: set[str], warn: Callable[[str], None]
) -> None:
    """Applies, once in a process, what this version needs; warns of those that were made for other versions.

    Args:
        version: The engine's version, with its name.
        release: The version's numbers, as many as the registry's have.
        registry: Its workarounds.
        skipped_by: A variable with names, separated by commas, that are not applied: for the tests that show what they are for, and for
            trying a newer engine.
        applied: Names that this process has dealt with; grows.
        warn: Gets one line for each.
    """
    skipped = os.environ.get(skipped_by, "").split(",")
    for workaround in registry:
        if workaround.name in applied or workaround.name in skipped:
            continue
        applied.add(workaround.name)
        if workaround.first <= release <= workaround.last:
            workaround.apply()
        elif not (workaround.is_mended and release > workaround.last):
            first, last = (".".join(map(str, numbers)) for numbers in (workaround.first, workaround.last))
            warn(
                f"rlbatch: the workaround {workaround.name} is for {first} to {last} and not applied to {version}. "
                f"If {workaround.symptom}, see {workaround.link}."
            )


def bind_stores(*modules: ModuleType) -> None:
    """Lets torch's TCP stores listen at the address that they are told, not at all of the machine: those of process groups of this process
    from here on, and those that modules make by the name ``TCPStore``.
    """
    import sys

    import torch.distributed  # noqa: F401  # its function `rendezvous` hides the module of that name

    for module in (sys.modules["torch.distributed.rendezvous"], *modules):
        if not hasattr(module.TCPStore, "listens_at_its_address"):
            module.TCPStore = _bound(module.TCPStore)  # type: ignore[attr-defined]


def _bound(store: type[Any]) -> type[Any]:
    class BoundStore(store):  # type: ignore[misc]
        listens_at_its_address = True

        def __init__(
            self, host_name: str, port: int, world_size: int | None = None, is_master: bool = False, *rest: Any, **more: Any
        ) -> None:
            if is_master and not rest and more.get("master_listen_fd") is None and (server := _listen(host_name, port)):
                port = server.getsockname()[1]
                more["master_listen_fd"] = server.detach()
            super().__init__(host_name, port, world_size, is_master, *rest, **more)

    return BoundStore


def _listen(host: str, port: int) -> socket.socket | None:
    """A socket for the store's server; None: this process has that server already, or somebody else has the port, as the store will say.

    Raises:
        OSError: the address is not this machine's.
    """
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    try:
        return socket.create_server(address[:2], family=family, backlog=BACKLOG)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        return None
