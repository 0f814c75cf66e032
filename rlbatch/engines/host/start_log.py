"""What an engine's processes wrote while it started: why it did not."""

from __future__ import annotations

import os
import re
import stat

FULL = re.compile(
    r"CUDA out of memory\. Tried to allocate ([\d.]+ \w+)\. GPU \d+ has a total capacity of ([\d.]+ \w+) of which ([\d.]+ \w+) is free"
)
"""torch's words for a GPU without room: wanted, total, free."""


def own_log() -> str:
    """What this process and its children have written, where it goes to a file."""
    if not stat.S_ISREG(os.fstat(1).st_mode):
        return ""
    with open("/proc/self/fd/1", encoding="utf-8", errors="replace") as log:
        return log.read()
