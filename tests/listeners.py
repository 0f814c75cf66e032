"""Where processes listen."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterable
from contextlib import suppress

import psutil

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def listening(pids: Iterable[int], where: Callable[[Address], bool]) -> list[str]:
    """TCP sockets at which processes listen, of addresses for which ``where`` is true, as ``<address>:<port> of <process>``."""
    found = []
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            for connection in process.net_connections("tcp"):
                if connection.status == psutil.CONN_LISTEN and where(ipaddress.ip_address(connection.laddr.ip)):
                    found.append(f"{connection.laddr.ip}:{connection.laddr.port} of {process.name()}")
    return found


def reachable(pids: Iterable[int]) -> list[str]:
    """Those that another machine might reach."""
    return listening(pids, lambda address: not address.is_loopback)
