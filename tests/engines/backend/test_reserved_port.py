"""A port where the nodes of an engine meet."""

from __future__ import annotations

import socket

import pytest

from rlbatch.api import RolloutError
from rlbatch.engines.backend.reserved_port import ReservedPort, agreed_port


def bound(port: int, *, reuse: bool) -> socket.socket:
    server = socket.socket()
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(reuse))
    server.bind(("127.0.0.1", port))
    return server


def test_nobody_else_gets_it() -> None:
    """Neither another reservation nor whoever asks for it; a server that we tell it does, and after its end the next one."""
    reserved, others = ReservedPort("127.0.0.1"), [ReservedPort("127.0.0.1") for _ in range(50)]
    assert len({reserved.number, *(other.number for other in others)}) == 51
    with pytest.raises(OSError, match="in use"):
        bound(reserved.number, reuse=False)
    for _ in range(2):
        with bound(reserved.number, reuse=True) as server:
            server.listen()
            with socket.create_connection(("127.0.0.1", reserved.number)):
                pass
    number = reserved.number
    del reserved
    bound(number, reuse=False).close()


def test_all_ranks_know_the_first_ones() -> None:
    """The others have none."""
    reserved = ReservedPort("127.0.0.1")
    assert agreed_port(lambda mine: [mine, b"0"], reserved) == reserved.number
    assert agreed_port(lambda mine: [b"4321", mine], None) == 4321


def test_another_machines_address() -> None:
    """The error names it, and the key that decides it."""
    with pytest.raises(RolloutError, match=r"^cluster\.interface: 192\.0\.2\.77 cannot be bound \(.*\), where the nodes of an engine"):
        ReservedPort("192.0.2.77")
