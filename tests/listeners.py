"""Where processes listen."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from contextlib import suppress

import psutil


def reachable(pids: Iterable[int]) -> list[str]:
    """TCP sockets at which these processes listen and that another machine might reach, as ``<address>:<port> of <process>``."""
    found = []
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            for connection in process.net_connections("tcp"):
                if connection.status == psutil.CONN_LISTEN and not ipaddress.ip_address(connection.laddr.ip).is_loopback:
                    found.append(f"{connection.laddr.ip}:{connection.laddr.port} of {process.name()}")
    return found
