"""Promises in seconds, on a machine that may be busy with something else."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

PRESSURE = Path("/proc/pressure/cpu")
PERIOD_S = 2.0
"""The kernel sums up what was waited for this often."""


class Stopwatch:
    """Runs from its making on.

    What is promised holds on a machine that has a processor for whoever wants one. So where more time has passed than a promise allows,
    the seconds in which some process waited for a processor do not count.
    """

    def __init__(self) -> None:
        self._started, self._waited_s = time.monotonic(), _waited_s()

    @property
    def passed_s(self) -> float:
        """Seconds by the clock."""
        return time.monotonic() - self._started

    def assert_within(self, limit_s: float) -> None:
        """Fails if the event, which is now, comes too late."""
        passed_s = self.passed_s
        if passed_s > limit_s:
            time.sleep(PERIOD_S)
            busy_s = _waited_s() - self._waited_s
            assert passed_s - busy_s <= limit_s, f"{passed_s:.1f} s, in {busy_s:.1f} s of which some process waited for a processor"


def _waited_s() -> float:
    with suppress(OSError):  # a kernel that does not count it
        return int(PRESSURE.read_text().split()[4].removeprefix("total=")) / 1e6
    return 0.0
