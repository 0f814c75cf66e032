"""The best checkpoint of a run, by a metric of its evaluations: ``best.json`` names it, and ``keep`` does not count it.

What decides is in each checkpoint's ``progress.json``: the best until then. ``best.json`` follows from it, written as latest.json is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlbatch.api import DataError
from rlbatch.checkpoint.run_folder import BEST, named_best, step_folder, write_best


@dataclass(frozen=True)
class Best:
    """A run's best checkpoint.

    Attributes:
        metric: Tag of the metric by which it is the best.
        value: The metric's value; more is better.
        step: The checkpoint's step.
    """

    metric: str
    value: float
    step: int

    @classmethod
    def of(cls, progress: Mapping[str, Any], metric: str) -> Best | None:
        """The best checkpoint that another one's progress names; None if it names none, or one by another metric."""
        said = progress.get("best")
        try:
            found = cls(str(said["metric"]), float(said["value"]), int(said["step"])) if said else None
        except (TypeError, KeyError, ValueError) as error:
            raise DataError(f"progress.json: best is damaged ({said!r}). Name another checkpoint in latest.json.") from error
        return found if found and found.metric == metric else None

    def name(self, root: Path) -> None:
        """Writes best.json. Rank 0 only, when the checkpoint is complete."""
        write_best(root, asdict(self))


def restore(root: Path, best: Best | None) -> Best | None:
    """Makes best.json say what a run goes on from, and returns it; None: that checkpoint is gone. Rank 0 only."""
    if best and step_folder(root, best.step).is_dir():
        best.name(root)
        return best
    if (folder := named_best(root)) is None or not folder.is_dir():
        (root / BEST).unlink(missing_ok=True)
    return None
