"""Messages between rank 0 and the others: JSON objects, one a line, over TCP connections that the kernels at both ends watch.

Before anything of the other end is parsed, both prove that they know the token of the job's attempt: rank 0 sends 32 random bytes; the
other answers with 32 of its own and an HMAC over both; so does rank 0. The token itself is never sent.
"""

from __future__ import annotations

import errno
import hmac
import json
import secrets
import socket
import threading
import time
from collections.abc import Mapping
from typing import Any

Message = dict[str, Any]

PROBE_S = 2
"""Seconds between the kernel's probes of an idle connection."""
LOST_S = 9
"""Seconds without any answer from the other machine's kernel after which a connection counts as lost. While what was sent is not
acknowledged there are no probes, and the time counts from there: so who sends at all must send at least every ``PROBE_S``.
"""
SEND_S = 5.0
"""Longest wait for a peer that reads nothing."""
MAX_LINE = 1 << 24
NONCE_BYTES = PROOF_BYTES = 32
_RANK, _RANK_0 = b"rank", b"rank 0"


class MachineLost(ConnectionError):
    """The kernel at the other end does not answer."""


class Link:
    """One connection. Any thread may send; one receives.

    The kernel tells at once when the process at the other end is gone, and after ``LOST_S`` when its machine is. A process that is busy or
    slow is neither: its kernel goes on answering.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._sending = threading.Lock()
        self._received = b""
        self._unread: list[Message] = []
        connection.settimeout(SEND_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, PROBE_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, -(-LOST_S // PROBE_S))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, LOST_S * 1000)

    def send(self, message: Mapping[str, Any]) -> bool:
        """Sends a message, and returns whether the connection is still there. That the peer read it is not known."""
        return self.send_bytes(json.dumps(message).encode() + b"\n")

    def send_bytes(self, content: bytes) -> bool:
        """Sends bytes as they are; see ``send``."""
        with self._sending:
            try:
                self._socket.sendall(content)
            except OSError:
                return False
        return True

    def take(self, size: int) -> bytes | None:
        """Takes the first ``size`` bytes of a connection, before any message; None while not all of them have come.

        Raises:
            ConnectionError: the peer ended.
        """
        self._received += self._read(size - len(self._received))
        if len(self._received) < size:
            return None
        taken, self._received = self._received, b""
        return taken

    def receive(self) -> list[Message]:
        """Messages that have come, after a wait for at least some bytes; maybe none is whole yet, or none came in time.

        Raises:
            MachineLost: the peer's machine is gone, or the way to it.
            ConnectionError: the peer ended, or sends something else.
        """
        if self._unread:
            unread, self._unread = self._unread, []
            return unread
        *lines, self._received = (self._received + self._read(1 << 16)).split(b"\n")
        if len(self._received) > MAX_LINE:
            raise ConnectionError("does not speak this protocol")
        try:
            messages = [json.loads(line) for line in lines]
        except (ValueError, RecursionError):
            raise ConnectionError("does not speak this protocol") from None
        if not all(isinstance(message, dict) for message in messages):
            raise ConnectionError("does not speak this protocol")
        return messages

    def _read(self, size: int) -> bytes:
        """The next bytes, at most ``size``; empty if none came in time."""
        try:
            part = self._socket.recv(size)
        except OSError as error:
            if error.errno in (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH):
                raise MachineLost(f"no answer from its machine for {LOST_S} s") from None
            if isinstance(error, TimeoutError):  # of the wait
                return b""
            raise ConnectionError(str(error)) from None
        if not part:
            raise ConnectionError("closed")
        return part

    def unread(self, messages: list[Message]) -> None:
        """Gives messages back: the next ``receive`` returns them."""
        self._unread = messages + self._unread

    def set_wait(self, seconds: float) -> None:
        """Longest wait of ``receive``."""
        self._socket.settimeout(seconds)

    def fileno(self) -> int:
        """The file descriptor for ``select``; -1 once closed."""
        return self._socket.fileno()

    def local_address(self) -> str:
        """This end's IP address."""
        return plain_address(str(self._socket.getsockname()[0]))

    def peer_address(self) -> str:
        """The other end's IP address."""
        try:
            return plain_address(str(self._socket.getpeername()[0]))
        except OSError:
            return "?"

    def close(self) -> None:
        """Ends the connection."""
        self._socket.close()


def plain_address(address: str) -> str:
    """An IPv4 address as such, also where a socket for both versions wrote it as IPv6."""
    return address.removeprefix("::ffff:")


class Handshake:
    """Rank 0's side of a connection that has not joined yet.

    Attributes:
        link: The link to the other side.
        until: When it must have joined.
        is_known: Whether it has proved that it knows the token.
    """

    def __init__(self, connection: socket.socket, token: str, limit_s: float) -> None:
        self.link, self.until, self.is_known = Link(connection), time.monotonic() + limit_s, False
        self._token, self._nonce = token, secrets.token_bytes(NONCE_BYTES)
        self.link.send_bytes(self._nonce)

    def receive(self) -> list[Message]:
        """The messages of the other side once it has proved that it knows the token; until then none.

        Raises:
            ConnectionError: it does not know the token, or is gone.
        """
        if self.is_known:
            return self.link.receive()
        answer = self.link.take(NONCE_BYTES + PROOF_BYTES)
        if answer is not None:
            theirs, proof = answer[:NONCE_BYTES], answer[NONCE_BYTES:]
            if not hmac.compare_digest(proof, _proof(self._token, _RANK, self._nonce, theirs)):
                raise ConnectionError("it does not know the token")
            self.link.send_bytes(_proof(self._token, _RANK_0, self._nonce, theirs))
            self.is_known = True
        return []


def authenticate(link: Link, token: str, limit_s: float) -> bool:
    """Proves to rank 0 that this side knows the token, and tells whether rank 0 knows it too. Raises ConnectionError if it hung up."""
    until = time.monotonic() + limit_s
    nonce = _await(link, NONCE_BYTES, until)
    if nonce is None:
        return False
    mine = secrets.token_bytes(NONCE_BYTES)
    link.send_bytes(mine + _proof(token, _RANK, nonce, mine))
    proof = _await(link, PROOF_BYTES, until)
    return proof is not None and hmac.compare_digest(proof, _proof(token, _RANK_0, nonce, mine))


def _await(link: Link, size: int, until: float) -> bytes | None:
    while time.monotonic() < until:
        if (part := link.take(size)) is not None:
            return part
    return None


def _proof(token: str, who: bytes, first: bytes, second: bytes) -> bytes:
    return hmac.digest(token.encode("utf-8", "surrogatepass"), who + first + second, "sha256")
