"""Reads ``metrics.jsonl``, which the tracker ``jsonl`` writes line by line, also while a run goes on or after it was killed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlbatch.api import DataError

METRICS = "metrics.jsonl"


def metric_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields step and values of each line. A truncated last line is left out, as its run was killed or is writing it.

    Raises:
        DataError: any other line is not one of the tracker's.
    """
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    for number, line in enumerate(lines, 1):
        try:
            told = json.loads(line)
            step = int(told["step"])
        except (ValueError, TypeError, KeyError, RecursionError):
            if number == len(lines):
                return
            raise DataError(f"{path}:{number}: not a line of step and metrics, as trackers=[jsonl] writes them. Remove it.") from None
        yield step, told
