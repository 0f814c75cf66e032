"""What is shown and kept of evaluations: a table of each set, and ``evaluations/<set>/step_000010.jsonl`` with the samples."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

FOLDER = "evaluations"
"""In the run folder."""


@dataclass(frozen=True)
class Evaluation:
    """Of one set.

    Attributes:
        name: Of the set.
        prompts: How many.
        samples: Of each prompt.
        table: Metric -> its mean over prompts, and the standard error of that; NaN with one prompt.
        unscored: ``errors`` and ``timeouts``: samples that their reward gave no verdict, which count 0.
        metrics: What is shown as curves: tag -> value.
        rows: Its samples, as of training steps, with the set's name.
    """

    name: str
    prompts: int
    samples: int
    table: Mapping[str, tuple[float, float]]
    unscored: Mapping[str, int]
    metrics: Mapping[str, float]
    rows: Sequence[Mapping[str, Any]]

    def summary(self, step: int) -> dict[str, Any]:
        """For summary.json."""
        values = {metric: {"value": value, "standard_error": error} for metric, (value, error) in self.table.items()}
        return {"step": step, "prompts": self.prompts, "n": self.samples, **self.unscored, **values}

    def markdown(self) -> str:
        """For TensorBoard."""
        lines = [f"| {metric} | {value:.4f} | {error:.4f} |" for metric, (value, error) in self.table.items()]
        lines += [f"| {kind} | {count} | |" for kind, count in self.unscored.items() if count]
        return "\n".join([f"| {self.prompts} prompts x {self.samples} | mean | standard error |", "| --- | --- | --- |", *lines])

    def line(self) -> str:
        """For the terminal, in one line."""
        numbers = ", ".join(
            f"{metric} {value:.3f}" for metric, (value, _) in self.table.items() if metric not in ("length_mean", "truncated")
        )
        unscored = "".join(f", {count} {kind}" for kind, count in self.unscored.items() if count)
        return f"eval {self.name}: {numbers}{unscored} ({self.prompts} prompts x {self.samples})"


def told(sets: Iterable[Evaluation]) -> str:
    """All sets, a line a metric."""
    cells = [("set", "prompts", "n", "metric", "mean", "standard error")]
    for each in sets:
        about = (each.name, str(each.prompts), str(each.samples))
        cells += [(*about, metric, f"{value:.4f}", f"{error:.4f}") for metric, (value, error) in each.table.items()]
        cells += [(*about, kind, str(count), "") for kind, count in each.unscored.items() if count]
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells)
