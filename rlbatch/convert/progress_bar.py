"""Shows how far a conversion is: bytes, GB/s and ETA; a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from rlbatch.metrics.progress import GB, format_seconds

LINE_S = 10.0
"""Seconds between lines where there is no terminal."""
LOOK_S = 2.0
"""Seconds between looks at what the other processes finished."""


class ConversionProgress:
    """Shows the whole conversion on the first process, nothing on the others.

    Args:
        title: What is shown before the numbers, e.g. ``writing``.
        total: Bytes of all files.
        others: Tells the bytes of files that were finished (by any process, before or now).
        is_shown: Whether to show anything.
        stream: Where; stdout if None.
    """

    def __init__(self, title: str, total: int, others: Callable[[], int], *, is_shown: bool, stream: TextIO | None = None) -> None:
        self._title, self._total, self._others, self._is_shown = title, total, others, is_shown
        self._stream = stream or sys.stdout
        self._bar: Progress | None = None
        self._own = 0
        self._finished = others()
        self._before = self._finished
        self._started = time.monotonic()
        self._next_line = self._started + LINE_S
        self._next_look = self._started + LOOK_S

    def __enter__(self) -> ConversionProgress:
        """Starts the display."""
        if self._is_shown and self._stream.isatty():
            columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[numbers]}"))
            self._bar = Progress(*columns, console=Console(file=self._stream))
            self._bar.add_task(self._title, total=self._total, numbers="")
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Ends the display."""
        if self._is_shown and kind is None:
            self._finished, self._own = self._total, 0
            self._show()
        if self._bar:
            self._bar.stop()

    def advance(self, nbytes: int) -> None:
        """This process wrote bytes."""
        self._own += nbytes
        self.refresh()

    def file_done(self) -> None:
        """This process finished a file, which is counted among the finished ones from now on."""
        self._own, self._finished = 0, self._others()

    def refresh(self) -> None:
        """Shows the numbers if it is time to."""
        now = time.monotonic()
        if now > self._next_look:
            self._next_look = now + LOOK_S
            self._finished = self._others()
        if self._is_shown and (self._bar is not None or now > self._next_line):
            self._next_line = now + LINE_S
            self._show()

    def numbers(self) -> str:
        """E.g. ``12.3 of 61.1 GB, 0.85 GB/s, 57s left``."""
        done, seconds = min(self._total, self._finished + self._own), time.monotonic() - self._started
        rate = (done - self._before) / seconds if seconds > 0 else 0.0
        left = f"{format_seconds((self._total - done) / rate)} left" if rate > 0 else "- left"
        if done == self._total:
            left = f"{format_seconds(seconds)} in all"
        digits = 2 if self._total >= GB else 6
        return f"{done / GB:.{digits}f} of {self._total / GB:.{digits}f} GB, {rate / GB:.2f} GB/s, {left}"

    def _show(self) -> None:
        if self._bar:
            self._bar.update(self._bar.task_ids[0], completed=min(self._total, self._finished + self._own), numbers=self.numbers())
        else:
            print(f"{self._title}: {self.numbers()}", file=self._stream, flush=True)
