"""``trackers=[jsonl]``: ``metrics.jsonl`` in the run folder, an object a line: ``step``, ``time`` (seconds since 1970) and metrics by tag.

A step may have several lines, with other tags; null stands for what is not finite.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlbatch.api import Configurable, NoOptions, TrackerContext, TrackerSpec, hookimpl

FILE = "metrics.jsonl"


class JsonLines:
    """The tracker that writes ``metrics.jsonl``."""

    def __init__(self, context: TrackerContext, options: NoOptions) -> None:
        """Removes the lines of later steps than ``context.done``, which are done again, and a last one that was cut short."""
        path = context.run_dir / FILE
        if path.exists():
            draft = Path(f"{path}.part")
            kept = [line for line in path.read_text(encoding="utf-8").splitlines() if _is_before(line, context.done)]
            draft.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
            os.replace(draft, path)
        self._file = path.open("a", encoding="utf-8")

    def record(self, step: int, metrics: Mapping[str, float]) -> None:
        """Adds a line, which is in the file on return."""
        finite = {tag: value if math.isfinite(value) else None for tag, value in metrics.items()}
        self._file.write(json.dumps({"step": step, "time": round(time.time(), 3), **finite}) + "\n")
        self._file.flush()

    def close(self, status: str) -> None:
        """Closes the file."""
        self._file.close()


def _is_before(line: str, done: int) -> bool:
    try:
        said: Any = json.loads(line)
        return bool(done and said["step"] <= done)
    except (ValueError, KeyError, TypeError):
        return False


@hookimpl
def rlbatch_register_trackers() -> Mapping[str, Configurable]:
    """Supplies ``jsonl``."""
    return {"jsonl": TrackerSpec(JsonLines, NoOptions, in_step=True)}
