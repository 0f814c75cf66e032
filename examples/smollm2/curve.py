"""Draws runs of the sums as one SVG: ``python -m examples.smollm2.curve docs/img/smollm2.svg RUN_DIR...`` (from the repository's root)."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.curves import COLOURS, GAP_X, GAP_Y, HEIGHT, LEFT, TOP, WIDTH, Panel, Run, linear, read, text


def draw(runs: Sequence[Run]) -> str:
    """Rewards and response lengths over the steps."""
    last = max(int(run.curves["reward/mean"][-1][0]) for run in runs)
    steps = linear(0, last, [last * tenth / 10 for tenth in range(0, 11, 2)])
    reward = Panel(0, 0, "Right answers: held-out sums (dots), training sums (thin)", steps, linear(0, 1, (0, 0.25, 0.5, 0.75, 1)))
    length = Panel(1, 0, "Tokens of a response, mean", steps, linear(0, 32, (0, 8, 16, 24, 32)))
    legend = []
    for index, (run, colour) in enumerate(zip(runs, COLOURS, strict=False)):
        reward.line(run.curves["reward/mean"], colour, faint=True)
        reward.line(run.curves["reward/eval"], colour, dots=True)
        length.line(run.curves["response/length_mean"], colour)
        legend.append(f'<rect x="{LEFT + 110 * index}" y="14" width="18" height="4" fill="{colour}"/>')
        legend.append(text(LEFT + 110 * index + 24, 21, run.name, 13))
    width, height = LEFT + 2 * WIDTH + GAP_X + 30, TOP + HEIGHT + GAP_Y // 2
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" font-family="sans-serif">'
    return "\n".join([head, f'<rect width="{width}" height="{height}" fill="white"/>', *legend, *reward.parts, *length.parts, "</svg>", ""])


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(draw([read(Path(folder)) for folder in sys.argv[2:]]), encoding="utf-8")
