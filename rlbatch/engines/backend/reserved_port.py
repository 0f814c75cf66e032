"""A TCP port at which the parts of an engine on several nodes meet, chosen so that no other job on the host gets it."""

from __future__ import annotations

import socket
from collections.abc import Callable

from rlbatch.api import RolloutError


class ReservedPort:
    """A free port of an address, kept for a process of ours as long as this object.

    It is bound, so that nobody else can choose it, and never listened at: Linux lets a listener with SO_REUSEADDR, which servers set, join
    a bound socket that has the option too; and again after that one was killed.

    Attributes:
        number: The port.

    Raises:
        RolloutError: the address is not this machine's.
    """

    def __init__(self, address: str) -> None:
        self._socket = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
        try:
            self._socket.bind((address, 0))
        except OSError as error:
            self._socket.close()
            raise RolloutError(
                f"cluster.interface: {address} cannot be bound ({error.strerror}), where the nodes of an engine were to meet. "
                "Set it to the network between the nodes."
            ) from error
        # Not before: whoever binds with the option shares with all others that have it, also while looking for a free port.
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.number: int = self._socket.getsockname()[1]

    def __del__(self) -> None:
        """Gives the port back."""
        self._socket.close()


def agreed_port(gather: Callable[[bytes], list[bytes]], reserved: ReservedPort | None) -> int:
    """The first rank's port, on every rank of an engine; a collective of them.

    Args:
        gather: Over the engine's ranks.
        reserved: On the first one.
    """
    return int(gather(str(reserved.number if reserved else 0).encode())[0])
