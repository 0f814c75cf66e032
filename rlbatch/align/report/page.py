"""Writes one self-contained HTML page: a curve over layers for each side, and tokens coloured by their log-prob difference."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from pathlib import Path

from rlbatch.align.report.answer import Answer

WIDTH, HEIGHT, MARGIN = 760, 220, 50
COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377")
SMALLEST = 1e-9
STYLE = (
    "body{font:14px sans-serif;margin:2em;max-width:70em}td,th{padding:.1em .6em;text-align:right}"
    "td.d{background:#fcc}span{padding:.1em .2em}"
)


def write_page(path: Path, title: str, answers: Sequence[Answer], num_layers: int) -> None:
    """Writes the page of a comparison.

    Args:
        path: Path of the file.
        title: Heading of the page.
        answers: Answer for each side other than the baseline.
        num_layers: Number of layers of the model.
    """
    parts = [f"<!doctype html><meta charset=utf-8><title>{escape(title)}</title><style>{STYLE}</style><h1>{escape(title)}</h1>"]
    parts += [f"<p>{escape(answer.sentence(num_layers))}</p>" for answer in answers]
    parts.append("<h2>Largest difference of each layer</h2>" + _curves(answers))
    for answer in answers:
        parts.append(f"<h2>{escape(answer.title)}</h2>" + _tokens(answer) + _table(answer))
    path.write_text("\n".join(parts) + "\n", encoding="utf-8")


def _curves(answers: Sequence[Answer]) -> str:
    drawn = []
    values = [[(row.place[0], row.largest) for row in answer.rows if row.place[1] in ("embedding", "output")] for answer in answers]
    layers = max((layer for points in values for layer, _ in points), default=0)
    for number, (answer, points) in enumerate(zip(answers, values, strict=True)):
        colour = COLOURS[number % len(COLOURS)]
        places = " ".join(f"{_across(layer, layers):.1f},{_up(value):.1f}" for layer, value in points)
        drawn.append(f'<polyline points="{places}" fill="none" stroke="{colour}" stroke-width="2"/>')
        drawn.append(f'<text x="{MARGIN + 5}" y="{MARGIN / 2 + 14 * number}" fill="{colour}">{escape(answer.title)}</text>')
    for power in range(-9, 2, 2):
        drawn.append(f'<text x="{MARGIN - 8}" y="{_up(10.0**power) + 4:.1f}" text-anchor="end">1e{power}</text>')
    drawn += [f'<text x="{_across(layer, layers):.1f}" y="{HEIGHT + MARGIN + 16}">{layer}</text>' for layer in (0, layers)]
    size = f'width="{WIDTH + 2 * MARGIN}" height="{HEIGHT + 2 * MARGIN}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-size="12">{"".join(drawn)}</svg>'


def _across(layer: int, layers: int) -> float:
    return MARGIN + (layer + 1) * WIDTH / max(layers + 1, 1)


def _up(value: float) -> float:
    power = math.log10(min(max(value, SMALLEST), 10.0))
    return MARGIN + HEIGHT * (1 - power) / (1 - math.log10(SMALLEST))


def _tokens(answer: Answer) -> str:
    rows, batch = [row for row in answer.rows if row.place[1] == "logprobs"], answer.batch
    if not rows:
        return ""
    lines = []
    for sequence in range(len(batch.sequences)):
        own = batch.owners == sequence
        cells = [
            f'<span style="background:rgba(238,102,119,{_depth(value, rows[0].limit):.2f})" title="{value:.2e} nats">{token}</span>'
            for token, value in zip(batch.tokens[own].tolist(), rows[0].errors[own].tolist(), strict=True)
        ]
        lines.append(f"<p>{sequence}: {' '.join(cells)}</p>")
    return "<p>Token ids, the redder the more their log-probs differ:</p>" + "".join(lines)


def _depth(value: float, limit: float) -> float:
    """Depth of a token's colour: 0 at the limit of rounding, 1 at one nat."""
    if value <= limit:
        return 0.0
    return min(1.0, 0.15 + 0.85 * math.log(value / limit) / max(math.log(1 / limit), 1e-9)) if math.isfinite(value) else 1.0


def _table(answer: Answer) -> str:
    cells = "".join(
        f"<tr><td>{row.place[0]}</td><td>{row.place[1]}</td><td{' class=d' if row.differs else ''}>{row.largest:.2e}</td>"
        f"<td>{row.limit:.2e}</td></tr>"
        for row in answer.rows
    )
    return f"<table><tr><th>layer</th><th>place</th><th>difference</th><th>rounding</th></tr>{cells}</table>"
