"""Output of evaluations: a table for each set, and the samples in ``evaluations/<set>/step_000010.jsonl``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

FOLDER = "evaluations"
"""Name of the folder in the run folder."""


@dataclass(frozen=True)
class Evaluation:
    """The results of an evaluation on one set.

    Attributes:
        name: Name of the set.
        prompts: Number of prompts.
        samples: Number of samples of each prompt.
        table: Metric -> mean over prompts, and its standard error, which is NaN with one prompt.
        unscored: ``errors`` or ``timeouts`` -> number of samples without a verdict, which count 0.
        metrics: Tag -> value, for the metrics that are shown as curves.
        rows: Samples of the set, in the form of training samples with the set's name.
    """

    name: str
    prompts: int
    samples: int
    table: Mapping[str, tuple[float, float]]
    unscored: Mapping[str, int]
    metrics: Mapping[str, float]
    rows: Sequence[Mapping[str, Any]]

    def summary(self, step: int) -> dict[str, Any]:
        """The results as an entry of summary.json."""
        values = {metric: {"value": value, "standard_error": error} for metric, (value, error) in self.table.items()}
        return {"step": step, "prompts": self.prompts, "n": self.samples, **self.unscored, **values}

    def markdown(self) -> str:
        """The results as a Markdown table, for TensorBoard."""
        lines = [f"| {metric} | {value:.4f} | {error:.4f} |" for metric, (value, error) in self.table.items()]
        lines += [f"| {kind} | {count} | |" for kind, count in self.unscored.items() if count]
        return "\n".join([f"| {self.prompts} prompts x {self.samples} | mean | standard error |", "| --- | --- | --- |", *lines])

    def line(self) -> str:
        """The results as one line for the terminal."""
        numbers = ", ".join(
            f"{metric} {value:.3f}" for metric, (value, _) in self.table.items() if metric not in ("length_mean", "truncated")
        )
        unscored = "".join(f", {count} {kind}" for kind, count in self.unscored.items() if count)
        return f"eval {self.name}: {numbers}{unscored} ({self.prompts} prompts x {self.samples})"


def told(sets: Iterable[Evaluation]) -> str:
    """The results of all sets as a text table, with a line for each metric."""
    cells = [("set", "prompts", "n", "metric", "mean", "standard error")]
    for each in sets:
        about = (each.name, str(each.prompts), str(each.samples))
        cells += [(*about, metric, f"{value:.4f}", f"{error:.4f}") for metric, (value, error) in each.table.items()]
        cells += [(*about, kind, str(count), "") for kind, count in each.unscored.items() if count]
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells)
