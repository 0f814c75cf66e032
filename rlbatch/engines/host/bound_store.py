"""torch's TCP store, listening at the address that it is told: torch's own listens at all addresses of the machine."""

from __future__ import annotations

import errno
import socket
from types import ModuleType
from typing import Any

BACKLOG = 2048
"""Connections that may wait, as torch has it."""


def bind_stores(*modules: ModuleType) -> None:
    """From here on process groups of this process meet at such stores, and so do those that modules make by the name ``TCPStore``."""
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
