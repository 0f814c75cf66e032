"""The port of the job's store. torch's server asks nobody who he is, so once all ranks have come, nobody else can.

The ranks tell over their links, which know the token, from which ports they came. Rank 0 lets the kernel drop whatever else comes to the
store's port, and hangs up on who is there already and is none of them.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import time
from collections.abc import Collection
from contextlib import suppress
from typing import Any

import psutil

from rlbatch.launch.membership.messages import plain_address

End = tuple[str, int]
"""Address and port of one end of a connection."""
_SO_ATTACH_FILTER = 26
_DROP_ALL = struct.pack("HBBI", 0x06, 0, 0, 0)
"""The filter program `return 0`: no byte of any packet is let through. Connections that were accepted before keep theirs, which is none."""
ACCEPTING_S, POLL_S = 10.0, 0.1
"""Longest time in which the store accepts what came before, also on a busy machine; seconds between looks."""
_TCP_INFO_SIZE, _WAITING_AT = 104, 24
"""Bytes of the kernel's ``struct tcp_info``, and where a listening socket's says how many connections wait to be accepted."""


class StorePort:
    """The port of the job's store, as rank 0 has it; made of the store's socket, which the store takes over."""

    def __init__(self, listening: socket.socket) -> None:
        self._socket = listening.dup()
        self.port: int = listening.getsockname()[1]

    def close(self, known: Collection[End]) -> list[End]:
        """Lets nobody in any more but those who came from ``known``; returns who was put out."""
        program = ctypes.create_string_buffer(_DROP_ALL)
        with suppress(OSError):  # a kernel without such filters: who comes later is not kept out
            self._socket.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HP", 1, ctypes.addressof(program)))
        until = time.monotonic() + ACCEPTING_S
        while self._waiting() and time.monotonic() < until:
            time.sleep(POLL_S)
        self._socket.close()
        time.sleep(POLL_S)  # the last one is being accepted
        strangers = []
        for connection in psutil.Process().net_connections("tcp"):
            if connection.laddr.port == self.port and connection.raddr and (end := _end(connection.raddr)) not in known:
                strangers.append(end)
                with suppress(OSError), socket.socket(fileno=os.dup(connection.fd)) as stranger:
                    stranger.shutdown(socket.SHUT_RDWR)
        return strangers

    def _waiting(self) -> int:
        """Connections that the store has not accepted yet; 0 where the kernel does not say."""
        with suppress(OSError, struct.error):
            said = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_SIZE)
            return int(struct.unpack_from("I", said, _WAITING_AT)[0])
        return 0


def ends_at(port: int) -> list[End]:
    """This process's ends of its connections to a port."""
    connections = psutil.Process().net_connections("tcp")
    return [_end(connection.laddr) for connection in connections if connection.raddr and connection.raddr.port == port]


def _end(address: Any) -> End:
    return plain_address(address.ip), address.port
