"""Lines from the rank that has an engine's host straight to the engine's workers: what they load passes neither host nor scheduler.

That way takes as long as a GPU takes for gigabytes. An engine that has no such lines loads what its host is told.
"""

from __future__ import annotations

import queue
import select
import socket
import time
from collections.abc import Sequence
from contextlib import suppress

from rlbatch.api import EngineLost
from rlbatch.engines.client import Call, EngineHost
from rlbatch.engines.pulse import Pulse
from rlbatch.engines.wire import Frame, Header, encode, read_frame

SOCKET = "lines"
DRAIN_LIMIT_S = 25.0


class Lines:
    """To all workers of a host, which come to a socket when it is asked to ``connect`` them, and answer every frame by one.

    Args:
        host: The engine.
        limit_s: For its answer, seconds.

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
                workers = host.call("connect", {"path": str(path)}, limit_s=limit_s)["workers"]
                self._lines = [listener.accept()[0] for _ in range(workers)]
            finally:
                path.unlink()

    def begin(self, operation: str, header: Header, payload: bytes, *, limit_s: float) -> Call:
        """As ``EngineHost.begin``; all workers get it. Calls are awaited in the order in which they begin.

        Args:
            operation: Its name.
            header: What they are told, JSON.
            payload: More of that.
            limit_s: For a worker to read it, which it does when it has loaded what came before, seconds.
        """
        call = LineCall(self._host, operation, self._lines)
        try:
            if self._host.lost:
                raise self._host.lost
            call.send(encode(header, payload), limit_s)
        except EngineLost:
            if not self._host.outlasts:
                raise
        return call

    def close(self) -> None:
        """Workers serve no longer."""
        for line in self._lines:
            line.close()

    def drain(self) -> None:
        """As ``close``, when workers have loaded what is on its way; those that do not end are not waited for longer than for any sign."""
        with suppress(OSError):
            for line in self._lines:
                line.shutdown(socket.SHUT_WR)
                line.settimeout(min(self._host.hang_limit_s, DRAIN_LIMIT_S))
            for line in self._lines:
                while line.recv(2**16):
                    pass
        self.close()


class LineCall(Call):
    """A call that workers answer over their lines."""

    def __init__(self, host: EngineHost, operation: str, lines: Sequence[socket.socket]) -> None:
        """Made by ``Lines.begin``."""
        super().__init__(host, operation, 0, queue.SimpleQueue())
        self._waiting = {line.fileno(): line for line in lines}

    def send(self, frame: bytes, limit_s: float) -> None:
        """To all workers.

        Raises:
            EngineLost: one of them is gone, or gives no sign of life.
        """
        pulse = self._pulse(self._host.patience_s(self._operation, limit_s))
        for line in self._waiting.values():
            rest, room = memoryview(frame), select.poll()
            room.register(line, select.POLLOUT)
            while rest:
                try:
                    rest = rest[line.send(rest, socket.MSG_DONTWAIT) :]
                except BlockingIOError:
                    if not room.poll(pulse.wait_s() * 1e3):
                        pulse.look()
                except OSError as error:
                    raise self._lose() from error

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

    def cancel(self) -> None:
        """A worker that loads does not stop."""

    def _answered(self, frame: Frame | None) -> None:
        if frame is None:
            raise self._lose()
        if "error" in frame[0]:
            raise self._host.failed(self._operation, frame[0])

    def _lose(self) -> EngineLost:
        return self._host.lose(f"the engine is dead (`{self._operation}`: one of its workers has hung up)")

    def _pulse(self, busy_limit_s: float) -> Pulse:
        """The scheduler, which answers to pings, is idle meanwhile."""
        return Pulse(self._host, self._operation, self._host.hang_limit_s, busy_limit_s, asks=False)
