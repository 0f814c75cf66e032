"""Limits what a program that came with a model may take: a chat template that loops for ever or makes gigabytes is an error."""

from __future__ import annotations

import resource
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

AGAIN_S = 0.2
"""Seconds until a limit is raised again: Jinja computes constants ahead, and swallows errors there."""


@contextmanager
def bounded(seconds: float, more_bytes: int) -> Iterator[None]:
    """Limits what the context may take. Without effect outside of the main thread, which signals do not reach.

    Args:
        seconds: Seconds of this process's own computing, so that a busy machine does not count.
        more_bytes: Bytes of memory beyond what the process has.

    Raises:
        TimeoutError: it takes longer.
        MemoryError: it takes more.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"it takes more than {seconds:g} s")

    limits = resource.getrlimit(resource.RLIMIT_AS)
    taken = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    known = [limit for limit in (*limits, taken + more_bytes) if limit != resource.RLIM_INFINITY]
    earlier = signal.signal(signal.SIGVTALRM, stop)
    try:
        resource.setrlimit(resource.RLIMIT_AS, (min(known), limits[1]))
        signal.setitimer(signal.ITIMER_VIRTUAL, seconds, AGAIN_S)
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, earlier)
        resource.setrlimit(resource.RLIMIT_AS, limits)
