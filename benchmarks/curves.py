"""Draws runs as one SVG: ``python benchmarks/curves.py docs/img/demo.svg runs/seed0 runs/seed1 runs/seed2``.

Reads TensorBoard events and summary.json of each run folder. Standard library and tensorboard only.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")  # Okabe and Ito: told apart by colour-blind readers
WIDTH, HEIGHT, LEFT, TOP, GAP_X, GAP_Y = 380, 200, 70, 66, 100, 96
PHASES = ("sync", "restart", "rollout", "reward", "exchange", "logprobs", "update")

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Run:
    """A run folder's curves (tag -> points) and summary."""

    name: str
    curves: dict[str, Points]
    summary: dict


@dataclass(frozen=True)
class Axis:
    """Value -> fraction of the axis, with the values that are labelled."""

    place: Callable[[float], float]
    ticks: Sequence[tuple[float, str]]


def read(folder: Path) -> Run:
    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    curves = {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    return Run(folder.name, curves, json.loads((folder / "summary.json").read_text(encoding="utf-8")))


def linear(low: float, high: float, ticks: Sequence[float]) -> Axis:
    return Axis(lambda value: (value - low) / (high - low), [(tick, f"{tick:g}") for tick in ticks])


def logarithmic(low_exponent: int, high_exponent: int) -> Axis:
    exponents = range(low_exponent, high_exponent + 1)
    span = high_exponent - low_exponent
    return Axis(lambda value: max(0.0, math.log10(max(value, 1e-30)) - low_exponent) / span, [(10.0**e, f"1e{e}") for e in exponents])


def text(x: float, y: float, content: str, size: int = 12, anchor: str = "start", colour: str = "#333") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{colour}">{escape(content)}</text>'


class Panel:
    """One set of axes at a column and row of the picture."""

    def __init__(self, column: int, row: int, title: str, x: Axis, y: Axis, below: str = "step") -> None:
        self.left, self.top = LEFT + column * (WIDTH + GAP_X), TOP + row * (HEIGHT + GAP_Y)
        self.x, self.y = x, y
        self.parts = [text(self.left, self.top - 12, title, 14, colour="#111")]
        for value, label in y.ticks:
            height = self.at(0, value)[1]
            self.parts.append(f'<path d="M{self.left} {height:.1f}h{WIDTH}" stroke="#e3e3e3"/>')
            self.parts.append(text(self.left - 8, height + 4, label, 11, "end"))
        for value, label in x.ticks:
            self.parts.append(text(self.left + x.place(value) * WIDTH, self.top + HEIGHT + 18, label, 11, "middle"))
        self.parts.append(text(self.left + WIDTH / 2, self.top + HEIGHT + 36, below, 11, "middle", "#666"))

    def at(self, x: float, y: float) -> tuple[float, float]:
        return self.left + self.x.place(x) * WIDTH, self.top + HEIGHT * (1 - self.y.place(y))

    def line(self, points: Points, colour: str, *, faint: bool = False, dots: bool = False) -> None:
        places = [self.at(x, y) for x, y in points]
        path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
        style = 'stroke-opacity="0.45" stroke-width="1.3"' if faint else 'stroke-width="2"'
        self.parts.append(f'<path d="{path}" fill="none" stroke="{colour}" {style}/>')
        if dots:
            self.parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.2" fill="{colour}"/>' for x, y in places]

    def level(self, value: float, label: str, *, below: bool = False) -> None:
        height = self.at(0, value)[1]
        self.parts.append(f'<path d="M{self.left} {height:.1f}h{WIDTH}" stroke="#888" stroke-dasharray="5 4"/>')
        self.parts.append(text(self.left + WIDTH - 4, height + (14 if below else -5), label, 11, "end", "#666"))


def reward_panel(runs: Sequence[Run], steps: Axis) -> list[str]:
    panel = Panel(0, 0, "Reward: held-out prompts (dots), training prompts (thin)", steps, linear(0, 1, (0, 0.25, 0.5, 0.75, 1)))
    panel.level(0.1, "chance: 0.1")
    panel.level(0.9, "target: 0.9", below=True)
    for run, colour in zip(runs, COLOURS, strict=False):
        panel.line(run.curves["reward/mean"], colour, faint=True)
        panel.line(run.curves["reward/eval"], colour, dots=True)
    return panel.parts


def entropy_panel(runs: Sequence[Run], steps: Axis) -> list[str]:
    panel = Panel(1, 0, "Entropy of the policy (nats)", steps, linear(0, 3, (0, 1, 2, 3)))
    for run, colour in zip(runs, COLOURS, strict=False):
        panel.line(run.curves["train/entropy"], colour)
    return panel.parts


def difference_panel(runs: Sequence[Run], steps: Axis) -> list[str]:
    panel = Panel(0, 1, "Trainer less engine log-probs, largest of the step (nats)", steps, logarithmic(-7, -3))
    panel.level(1e-4, "limit on the mean: rollout.max_logprob_diff")
    for run, colour in zip(runs, COLOURS, strict=False):
        panel.line(run.curves["train/rollout_logprob_diff_max"], colour)
    return panel.parts


def phase_bars(run: Run) -> list[str]:
    """Seconds of an average step of one run, by phase."""
    left, top = LEFT + WIDTH + GAP_X, TOP + HEIGHT + GAP_Y
    spent = run.summary["phase_seconds"]
    seconds = {phase: spent[phase] / run.summary["steps"] for phase in PHASES if phase in spent}
    longest, row = max(seconds.values()), HEIGHT / len(seconds)
    parts = [text(left, top - 12, f"Seconds of an average step ({run.name})", 14, colour="#111")]
    for index, (phase, value) in enumerate(seconds.items()):
        y, width = top + index * row, 230 * value / longest
        parts.append(text(left + 68, y + row / 2 + 4, phase, 12, "end"))
        parts.append(f'<rect x="{left + 76}" y="{y + 5:.1f}" width="{width:.1f}" height="{row - 10:.1f}" fill="#7aa6c2"/>')
        parts.append(text(left + 82 + width, y + row / 2 + 4, f"{value:.3f} s", 11))
    return parts


def draw(runs: Sequence[Run]) -> str:
    last = max(run.summary["steps"] for run in runs)
    steps = linear(0, last, [round(last * i / 6) for i in range(7)])
    width, height = LEFT + 2 * WIDTH + GAP_X + 30, TOP + 2 * HEIGHT + GAP_Y + 50
    legend: list[str] = []
    for index, (run, colour) in enumerate(zip(runs, COLOURS, strict=False)):
        x = LEFT + 110 * index
        legend.append(f'<rect x="{x}" y="14" width="18" height="4" fill="{colour}"/>' + text(x + 24, 21, run.name, 13))
    parts = [*legend, *reward_panel(runs, steps), *entropy_panel(runs, steps), *difference_panel(runs, steps), *phase_bars(runs[0])]
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" font-family="sans-serif">'
    return "\n".join([head, f'<rect width="{width}" height="{height}" fill="white"/>', *parts, "</svg>\n"])


if __name__ == "__main__":
    picture, *folders = map(Path, sys.argv[1:])
    if not folders:
        sys.exit(__doc__)
    picture.write_text(draw([read(folder) for folder in folders]), encoding="utf-8")
