"""The store's port, once all ranks have come: test_messages.py has whole jobs."""

from __future__ import annotations

import socket
import threading

from rlbatch.launch.membership.store_port import StorePort
from rlbatch.launch.ranks.interfaces import listen


def test_who_is_accepted_late_is_put_out_too() -> None:
    """The store's thread may be slow on a busy machine: a stranger that is still at the door when it closes is found inside."""
    with listen("127.0.0.1", 0, 8) as store:
        port, accepted = StorePort(store), list[socket.socket]()
        with socket.create_connection(store.getsockname(), 60.0) as stranger, socket.create_connection(store.getsockname()) as rank:
            late = [threading.Timer(0.5 * number, lambda: accepted.append(store.accept()[0])) for number in (1, 2)]
            for timer in late:
                timer.start()
            assert port.close([rank.getsockname()]) == [stranger.getsockname()]
            assert stranger.recv(1) == b""
            for timer in late:
                timer.join()
        for connection in accepted:
            connection.close()
