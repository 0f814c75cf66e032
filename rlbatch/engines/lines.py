"""Lines from the rank that has an engine's host straight to the engine's workers: what they load passes neither host nor scheduler.

That way takes a millisecond or so, in which a GPU copies gigabytes. An engine that has no such lines loads what its host is told.
"""

from __future__ import annotations

import queue
import select
import socket
import struct
import time
from collections.abc import Sequence

from rlbatch.api import EngineLost
from rlbatch.engines.client import SEND_LIMIT_S, Call, EngineHost
from rlbatch.engines.wire import Frame, Header, encode, read_frame

SOCKET = "lines"


class Lines:
    """To all workers of a host, which come to a socket when it is asked to ``connect`` them, and answer every frame by one.

    Args:
        host: The engine.
        limit_s: For its answer, seconds.

    Attributes:
        in_lockstep: Whether the workers compute together with others, also when there are no requests.

    Raises:
        EngineLost: the engine is lost.
        RolloutError: its workers do not come.
    """

    def __init__(self, host: EngineHost, limit_s: float) -> None:
        self._host = host
        path = host.sockets / SOCKET
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
            listener.listen(socket.SOMAXCONN)
            try:
                said = host.call("connect", {"path": str(path)}, limit_s=limit_s)
                self._lines = [listener.accept()[0] for _ in range(said["workers"])]
            finally:
                path.unlink()
        self.in_lockstep = bool(said["in_lockstep"])
        for line in self._lines:
            line.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SEND_LIMIT_S, 0))

    def begin(self, operation: str, header: Header, payload: bytes) -> Call:
        """As ``EngineHost.begin``; all workers get it. One call must be over before the next one's end is awaited."""
        call, frame = LineCall(self._host, operation, self._lines), encode(header, payload)
        try:
            if self._host.lost:
                raise self._host.lost
            self._send(frame, operation)
        except EngineLost:
            if not self._host.outlasts:
                raise
        return call

    def _send(self, frame: bytes, operation: str) -> None:
        try:
            for line in self._lines:
                line.sendall(frame)
        except OSError as error:
            raise self._host.lose(_gone(operation)) from error

    def close(self) -> None:
        """Hangs up."""
        for line in self._lines:
            line.close()


class LineCall(Call):
    """A call that workers answer over their lines."""

    def __init__(self, host: EngineHost, operation: str, lines: Sequence[socket.socket]) -> None:
        """Made by ``Lines.begin``."""
        super().__init__(host, operation, 0, queue.SimpleQueue())
        self._waiting = {line.fileno(): line for line in lines}

    def next(self, limit_s: float) -> Frame | None:
        """As ``Call.next``: the only answer, when all workers have given theirs."""
        deadline, poll = time.monotonic() + limit_s, select.poll()
        for number in self._waiting:
            poll.register(number, select.POLLIN)
        while self._waiting:
            ready = poll.poll(max(deadline - time.monotonic(), 0.0) * 1e3)
            if not ready:
                return None
            for number, _ in ready:
                poll.unregister(number)
                self._answered(read_frame(self._waiting.pop(number)))
        return {"end": True}, b""

    def _answered(self, frame: Frame | None) -> None:
        if frame is None:
            raise self._host.lose(_gone(self._operation))
        if "error" in frame[0]:
            raise self._host.failed(self._operation, frame[0])

    def cancel(self) -> None:
        """A worker that loads does not stop."""


def _gone(operation: str) -> str:
    return f"the engine is dead (`{operation}`: one of its workers has hung up)"
