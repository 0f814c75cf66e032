"""Signals of a launcher that waits for one child: they go on to it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

_PASSED = {
    signal.SIGINT: signal.SIGTERM,
    signal.SIGTERM: signal.SIGTERM,
    signal.SIGUSR1: signal.SIGUSR1,
    signal.SIGUSR2: signal.SIGUSR2,
}
"""What came -> what the child gets."""


class PassedSignals:
    """What came so far.

    Attributes:
        stop: SIGINT or SIGTERM if one came, else 0.
    """

    def __init__(self) -> None:
        self.stop = 0
        self._waiting: list[int] = []
        self._pid = 0

    def pass_to(self, pid: int) -> None:
        """Names the child; signals that came before go to it now."""
        self._pid = pid
        for number in self._waiting:
            self._send(number)

    def receive(self, number: int, frame: FrameType | None) -> None:
        """The handler."""
        if number in (signal.SIGINT, signal.SIGTERM):
            self.stop = self.stop or number
        if self._pid:
            self._send(number)
        else:
            self._waiting.append(number)

    def _send(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(self._pid, _PASSED[signal.Signals(number)])


@contextmanager
def passed_signals() -> Iterator[PassedSignals]:
    """Passes Ctrl-C and SIGTERM (as SIGTERM), USR1 and USR2 on to a child."""
    signals = PassedSignals()
    previous = {number: signal.signal(number, signals.receive) for number in _PASSED}
    try:
        yield signals
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
