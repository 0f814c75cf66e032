"""Draws held-out accuracy over the tokens that were sampled for it, and prints how many it took to reach some accuracies:
``python -m examples.smollm2.tokens docs/img/smollm2_tokens.svg RUN_DIR...`` (from the repository's root; runs with ``trackers=[jsonl]``).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

from benchmarks.curves import COLOURS, HEIGHT, LEFT, TOP, WIDTH, Panel, linear, text
from rlbatch.metrics.metrics_file import METRICS, metric_lines

GROUPS, SAMPLES = 32, 16
"""Of a step of the experiment where nothing is filtered."""
LEVELS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.93)


def curve(run_dir: Path) -> Iterator[tuple[float, float]]:
    """Thousands of tokens that training has sampled, and the held-out accuracy then; of runs that finish every response in its step."""
    steps: dict[int, dict[str, float]] = {}
    for step, found in metric_lines(run_dir / METRICS):
        steps.setdefault(step, {}).update(found)
    tokens = 0.0
    for _, found in sorted(steps.items()):
        if sampled := found.get("sampling/sampled"):
            accepted = found["sampling/accepted"]
            tokens += accepted * found.get("sampling/accepted_length", 0) + (sampled - accepted) * found.get("sampling/dropped_length", 0)
        else:
            tokens += GROUPS * found.get("response/length_mean", 0)
        yield tokens * SAMPLES / 1000, found["reward/eval"]


def reached(points: Sequence[tuple[float, float]], level: float) -> float:
    """Thousands of tokens, between two evaluations in proportion."""
    for (before, low), (after, high) in pairwise(points):
        if low < level <= high:
            return before + (after - before) * (level - low) / (high - low)
    return float("nan")


def main(picture: str, *folders: str) -> None:
    """Prints the table and writes the picture; runs of one name before its last digit have one colour."""
    runs = {Path(folder).name: list(curve(Path(folder))) for folder in folders}
    for level in LEVELS:
        print(level, *(f"{reached(points, level):.1f}" for points in runs.values()))
    kinds = list(dict.fromkeys(name.rstrip("0123456789") for name in runs))
    panel = Panel(
        *(0, 0, "Right answers to held-out sums", linear(0, 180, range(0, 181, 30)), linear(0, 1, (0, 0.25, 0.5, 0.75, 1))),
        below="thousand tokens sampled in training",
    )
    for name, points in runs.items():
        panel.line([(x, y) for x, y in points if x <= 180], COLOURS[kinds.index(name.rstrip("0123456789"))])
    legend = [
        f'<rect x="{LEFT + 110 * i}" y="14" width="18" height="4" fill="{COLOURS[i]}"/>' + text(LEFT + 110 * i + 24, 21, kind, 13)
        for i, kind in enumerate(kinds)
    ]
    width, height = LEFT + WIDTH + 30, TOP + HEIGHT + 50
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" font-family="sans-serif">'
    body = [head, f'<rect width="{width}" height="{height}" fill="white"/>', *legend, *panel.parts, "</svg>\n"]
    Path(picture).write_text("\n".join(body), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
