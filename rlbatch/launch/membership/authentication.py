"""Who may talk to a job: both ends of a connection prove that they know the token of its attempt, before anything of the other is parsed.

Rank 0 sends 32 random bytes; the other answers with 32 of its own and an HMAC over both; so does rank 0. The token itself is never sent.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import time

from rlbatch.launch.membership.messages import Link, Message

NONCE_BYTES = PROOF_BYTES = 32
_RANK, _RANK_0 = b"rank", b"rank 0"


class Guest:
    """Rank 0's side of a connection that has not joined yet.

    Attributes:
        link: To it.
        until: When it must have joined.
        is_known: Whether it has proved that it knows the token.
    """

    def __init__(self, connection: socket.socket, token: str, limit_s: float) -> None:
        self.link, self.until, self.is_known = Link(connection), time.monotonic() + limit_s, False
        self._token, self._nonce = token, secrets.token_bytes(NONCE_BYTES)
        self.link.send_bytes(self._nonce)

    def hear(self) -> list[Message]:
        """Messages, once it has proved itself; until then none.

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


def introduce(link: Link, token: str, limit_s: float) -> bool:
    """The other side, which waits; whether who listens there knows the token too.

    Raises:
        ConnectionError: it hung up.
    """
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
