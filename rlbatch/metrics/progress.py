"""Shows live progress: a bar on a terminal or a line for each step elsewhere, and lines for transfers of many bytes."""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn
from rich.table import Column

from rlbatch.api import StepResult

RECENT_STEPS = 10
"""Number of recent steps whose mean duration predicts the remaining time."""
INTERVAL_S = 10.0
"""Seconds between two lines about bytes; shorter transfers show none."""
GB = 1e9


class RunProgress:
    """Shows the progress of a run: its phase before the first step, then step, reward, length, KL, step time and ETA."""

    def __init__(self, steps: int, stream: TextIO | None = None) -> None:
        """Starts the display.

        Args:
            steps: Number of steps of the run; 0: it has none, and only phases are shown.
            stream: Stream to show it on; stdout if None.
        """
        self._steps = steps
        self._stream = stream or sys.stdout
        self._step_seconds: deque[float] = deque(maxlen=RECENT_STEPS)
        self._eval: float | None = None
        self._bar = _start_bar(self._stream, steps) if steps and _is_live(self._stream) else None

    def phase(self, text: str) -> None:
        """Announces what happens before the first step or after the last, e.g. ``loading the model``."""
        self._leave_lost_terminal()
        self._print(text)
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], description=text)

    def record(self, result: StepResult) -> None:
        """Shows a step; step 0 is the evaluation before the first one."""
        if not self._steps:
            return
        self._leave_lost_terminal()
        metrics = result.metrics
        if "time/step_s" in metrics:
            self._step_seconds.append(metrics["time/step_s"])
        self._eval = metrics.get("reward/eval", self._eval)
        if self._bar is None:
            self._print(f"step {result.step}/{self._steps}  {self._numbers(result)}")
            return
        if "reward/eval" in metrics:
            self._print(f"step {result.step}/{self._steps}  held-out reward {self._eval:.3f}")
        self._bar.update(self._bar.task_ids[0], completed=result.step, description="step", numbers=self._numbers(result))

    def _leave_lost_terminal(self) -> None:
        """Changes from the bar to a line for each step when the stream is no terminal any more."""
        if self._bar is not None and not self._stream.isatty():
            self._bar.stop()
            self._bar = None

    def close(self) -> None:
        """Ends the display; may be called again."""
        if self._bar is not None:
            self._bar.stop()

    def _print(self, text: str) -> None:
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False)
        else:
            print(text, file=self._stream, flush=True)

    def _numbers(self, result: StepResult) -> str:
        metrics = result.metrics
        kl = "kl" if "train/kl" in metrics else "ppo_kl"
        last = self._step_seconds[-1] if self._step_seconds else None
        return "  ".join(
            (
                f"reward {_value(metrics, 'reward/mean', '.2f')}",
                f"eval {'-' if self._eval is None else format(self._eval, '.2f')}",
                f"length {_value(metrics, 'response/length_mean', '.1f')}",
                f"{kl} {_value(metrics, f'train/{kl}', '.2g')}",
                f"step {'-' if last is None else format(last, '.2f')} s",
                f"eta {self._eta(result.step)}",
            )
        )

    def _eta(self, step: int) -> str:
        if not self._step_seconds:
            return "-"
        return format_seconds((self._steps - step) * sum(self._step_seconds) / len(self._step_seconds))


def format_seconds(seconds: float) -> str:
    """Text of a duration, e.g. ``45s``, ``1m12s``, ``2h05m``, ``3d04h``."""
    total = round(seconds)
    if total < 60:
        return f"{total}s"
    if total < 3600:
        return f"{total // 60}m{total % 60:02d}s"
    if total < 86400:
        return f"{total // 3600}h{total % 3600 // 60:02d}m"
    return f"{total // 86400}d{total % 86400 // 3600:02d}h"


def _value(metrics: Mapping[str, float], tag: str, spec: str) -> str:
    return format(metrics[tag], spec) if tag in metrics else "-"


def _is_live(stream: TextIO) -> bool:
    return stream.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown")


def _start_bar(stream: TextIO, steps: int) -> Progress:
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description} {task.completed:.0f}/{task.total:.0f}"),
        BarColumn(bar_width=20),
        # A narrow terminal wraps the numbers instead of cutting off the ETA.
        TextColumn("{task.fields[numbers]}", table_column=Column(no_wrap=False)),
    )
    bar = Progress(*columns, console=Console(file=stream, force_terminal=True), refresh_per_second=4)
    bar.add_task("starting", total=steps, numbers="")
    bar.start()
    # A rank may be ended by a signal at any time, and must not leave the user's terminal without a cursor.
    bar.console.show_cursor(True)
    return bar


class ByteProgress:
    """Shows the progress of a transfer of many bytes in lines every few seconds: amount, rate, and time left.

    Args:
        what: Beginning of every line, e.g. ``reading /models/Qwen3-30B-A3B``.
        total_bytes: Bytes of the whole transfer.
        announce: Called with each line.
        clock: Returns the time, seconds.
        before: Bytes that were transferred earlier.
    """

    def __init__(
        self, what: str, total_bytes: int, announce: Callable[[str], None], clock: Callable[[], float] = time.monotonic, before: int = 0
    ) -> None:
        self._what, self._total, self._announce, self._clock = what, total_bytes, announce, clock
        self._done = self._before = before
        self._begun = self._told = clock()

    def add(self, nbytes: int) -> None:
        """Adds transferred bytes."""
        self.reach(self._done + nbytes)

    def reach(self, done: int) -> None:
        """Sets the number of transferred bytes, which others may have moved too."""
        self._done = done
        now = self._clock()
        if now - self._told >= INTERVAL_S:
            self._told = now
            rate = (self._done - self._before) / (now - self._begun)
            left = format_seconds((self._total - self._done) / rate) if rate else "-"
            self._announce(f"{self._what}: {self._done / GB:.1f} of {self._total / GB:.1f} GB, {rate / GB:.2f} GB/s, {left} left")

    def close(self) -> None:
        """Shows a line about the whole transfer, if any line was shown before."""
        if self._told > self._begun:
            seconds = self._clock() - self._begun
            done = (self._done - self._before) / GB
            self._announce(f"{self._what}: {done:.1f} GB in {format_seconds(seconds)}, {done / seconds:.2f} GB/s")
