"""Draws how long prompts are: as text, and as an SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

BINS, BAR_COLUMNS = 16, 50
WIDTH, HEIGHT, MARGIN = 720, 160, 40
"""Size of a histogram and the margin around it, pixels."""


def bins(lengths: Sequence[int], count: int = BINS) -> list[tuple[int, int, int]]:
    """Least and most tokens of each bin, equally wide, and how many prompts are in it."""
    low, high = min(lengths), max(lengths)
    width = max(1, -(-(high - low + 1) // count))
    counts = [0] * -(-(high - low + 1) // width)
    for length in lengths:
        counts[(length - low) // width] += 1
    return [(low + number * width, low + (number + 1) * width - 1, found) for number, found in enumerate(counts)]


def bars(lengths: Sequence[int]) -> list[str]:
    """A line for each bin."""
    found = bins(lengths)
    most, digits = max(count for *_, count in found), len(str(found[-1][1]))
    return [
        f"{low:>{digits}} - {high:>{digits}} {'#' * -(-count * BAR_COLUMNS // most):<{BAR_COLUMNS}} {count}" for low, high, count in found
    ]


def write_svg(path: Path, sets: Mapping[str, Sequence[int]]) -> None:
    """Writes a histogram of each set's tokens of each prompt, one below the other; empty ones are left out."""
    drawn = {name: lengths for name, lengths in sets.items() if lengths}
    total = len(drawn) * (HEIGHT + 2 * MARGIN)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH + 2 * MARGIN}" height="{total}" font-family="sans-serif" font-size="12">'
    ]
    parts.append('<rect width="100%" height="100%" fill="white"/>')
    for number, (name, lengths) in enumerate(drawn.items()):
        top = number * (HEIGHT + 2 * MARGIN) + MARGIN
        found = bins(lengths, 48)
        most, step = max(count for *_, count in found), WIDTH / len(found)
        parts.append(f'<text x="{MARGIN}" y="{top - 10}">{escape(name)}: tokens of {len(lengths)} prompts, at most {most} a bar</text>')
        for place, (low, high, count) in enumerate(found):
            height = HEIGHT * count / most
            box = f'x="{MARGIN + place * step:.1f}" y="{top + HEIGHT - height:.1f}" width="{max(step - 1, 1):.1f}" height="{height:.1f}"'
            parts.append(f'<rect {box} fill="#4477aa"><title>{low} - {high}: {count}</title></rect>')
        for place, value in ((0, found[0][0]), (1, found[-1][1])):
            anchor = "end" if place else "start"
            parts.append(f'<text x="{MARGIN + place * WIDTH}" y="{top + HEIGHT + 16}" text-anchor="{anchor}">{value}</text>')
    path.write_text("\n".join([*parts, "</svg>", ""]), encoding="utf-8")
