"""The command ``python -m rlbatch.mismatch``: how far engine and trainer are from each other in a run, as one page; imports no torch."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from rlbatch.api import ConfigError, RlbatchError
from rlbatch.api.exit_codes import DONE, REFUSED
from rlbatch.metrics.metrics_file import METRICS, metric_lines

USAGE = """\
Draws how far engine and trainer are from each other in a run, step by step, as one self-contained page: mean absolute differences of
log-probs, of all sampled tokens, by the token's place in its response, and by kind (first, last, with a digit, repeated).

Usage: python -m rlbatch.mismatch RUN_DIR [PAGE]      # PAGE: RUN_DIR/mismatch.html

Reads metrics.jsonl of the run folder (trackers=[jsonl]) or its TensorBoard events."""
MEAN, MOST, LIMIT = (f"train/rollout_logprob_diff_{name}" for name in ("mean", "max", "limit"))
KINDS = {f"mismatch/diff_{kind}": kind for kind in ("first", "last", "digits", "repeated")}
LAYER = re.compile(r"mismatch/first_other_experts_(\d+)")
PLACE = re.compile(r"mismatch/diff_at_(\d+)")
WIDTH, HEIGHT, MARGIN, CELL = 760, 200, 60, 14
COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377")
STYLE = "body{font:14px sans-serif;margin:2em;max-width:70em}td,th{padding:.1em .6em;text-align:right}"
SMALLEST = 1e-12

Points = Sequence[tuple[int, float]]
"""Points of a curve: step and value."""


def main(arguments: Sequence[str]) -> int:
    """Runs the command; returns the exit code."""
    if not arguments or {"-h", "--help"} & set(arguments) or len(arguments) > 2:
        print(USAGE)
        return DONE if {"-h", "--help"} & set(arguments) else REFUSED
    folder = Path(arguments[0])
    path = Path(arguments[1]) if len(arguments) > 1 else folder / "mismatch.html"
    try:
        curves = read(folder)
        path.write_text(page(str(folder), curves), encoding="utf-8")
    except RlbatchError as error:
        print(error, file=sys.stderr)
        return REFUSED
    except OSError as error:
        print(f"{path}: cannot be written ({error.strerror}).", file=sys.stderr)
        return REFUSED
    last, value = curves[MEAN][-1]
    print(f"{path}: {len(curves[MEAN])} steps; mean difference of step {last}: {value:.3g} nats")
    return DONE


def read(folder: Path) -> dict[str, Points]:
    """A run's metrics as its trackers got them: tag -> curve.

    Raises:
        ConfigError: there is nothing that can be read.
        DataError: a line of metrics.jsonl is none.
    """
    lines, events = folder / METRICS, next(folder.rglob("events.out.tfevents.*"), None)
    curves: dict[str, dict[int, float]] = {}
    if lines.is_file():
        for step, told in metric_lines(lines):
            for tag, value in told.items():
                if isinstance(value, (int, float)):
                    curves.setdefault(tag, {})[step] = float(value)
    elif events is not None:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        found = EventAccumulator(str(events.parent), size_guidance={"scalars": 0})
        found.Reload()
        for tag in found.Tags()["scalars"]:
            curves[tag] = {event.step: event.value for event in found.Scalars(tag)}
    if MEAN not in curves:
        raise ConfigError(
            f"{folder}: has neither metrics.jsonl nor TensorBoard events with {MEAN}. Give the folder of a run that has made a step, and "
            "whose trackers wrote one of them."
        )
    return {tag: sorted(points.items()) for tag, points in curves.items()}


def page(title: str, curves: Mapping[str, Points]) -> str:
    """The page as HTML."""
    places = _numbered(PLACE, curves)
    all_of_it = {name: curves[tag] for tag, name in ((MEAN, "mean"), (MOST, "largest"), (LIMIT, "limit on the mean")) if tag in curves}
    kinds = {"all": curves[MEAN], **{name: curves[tag] for tag, name in KINDS.items() if tag in curves}}
    parts = [
        f"<!doctype html><meta charset=utf-8><title>{escape(title)}</title><style>{STYLE}</style>",
        f"<h1>Engine and trainer: {escape(title)}</h1><p>Mean absolute differences of log-probs, nats, before each first update.</p>",
        "<h2>All sampled tokens</h2>" + lines_of(all_of_it),
        "<h2>By kind of token</h2>" + lines_of(kinds),
        "<h2>By place in the response</h2>" + heat_map(places),
        *layers_of(curves),
        table({**kinds, **{f"tokens {place} - {2 * place - 1}": points for place, points in places.items()}}),
    ]
    return "\n".join(parts) + "\n"


def layers_of(curves: Mapping[str, Points]) -> list[str]:
    """The section on the layers where engine and trainer first choose other experts; empty if that is not known."""
    layers = _numbered(LAYER, curves)
    if not layers:
        return []
    cells = "".join(
        f"<tr><td>{layer}</td><td>{points[0][1]:.2%}</td><td>{points[-1][1]:.2%}</td><td>{len(points)}</td></tr>"
        for layer, points in layers.items()
    )
    head = "<tr><th>layer</th><th>first step with some</th><th>last</th><th>steps with some</th></tr>"
    return [f"<h2>First layer with other experts, share of sampled packs' tokens</h2><table>{head}{cells}</table>"]


def lines_of(curves: Mapping[str, Points]) -> str:
    """Curves over steps, on a logarithmic axis, as SVG."""
    shown = {name: [(step, value) for step, value in points if value > SMALLEST] for name, points in curves.items()}
    values = [value for points in shown.values() for _, value in points]
    if not values:
        return "<p>There is no difference.</p>"
    low, high = math.floor(math.log10(min(values))), max(math.ceil(math.log10(max(values))), math.floor(math.log10(min(values))) + 1)
    steps = [step for points in shown.values() for step, _ in points]
    first, span = min(steps), max(max(steps) - min(steps), 1)
    drawn = [
        f'<text x="{MARGIN - 6}" y="{MARGIN / 2 + HEIGHT * (high - power) / (high - low) + 4:.1f}" text-anchor="end">1e{power}</text>'
        for power in range(low, high + 1)
    ]
    for (name, points), colour in zip(shown.items(), COLOURS, strict=False):
        dots = [
            (MARGIN + WIDTH * (step - first) / span, MARGIN / 2 + HEIGHT * (high - math.log10(value)) / (high - low))
            for step, value in points
        ]
        drawn.append(f'<polyline points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in dots)}" fill="none" stroke="{colour}" stroke-width="2"/>')
        drawn += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2" fill="{colour}"/>' for x, y in dots if len(dots) == 1]
        drawn.append(f'<text x="{MARGIN + WIDTH + 8}" y="{MARGIN / 2 + 16 * len(drawn) % HEIGHT}" fill="{colour}">{escape(name)}</text>')
    drawn += [f'<text x="{MARGIN + x}" y="{HEIGHT + MARGIN}">{step}</text>' for x, step in ((0, first), (WIDTH - 20, max(steps)))]
    return _svg(drawn, WIDTH + 3 * MARGIN, HEIGHT + MARGIN + 10)


def heat_map(places: Mapping[int, Points]) -> str:
    """A row for each span of places, a column for each step, the redder the larger (logarithmic), as SVG."""
    values = [value for points in places.values() for _, value in points if value > SMALLEST]
    if not values:
        return "<p>Nothing is known.</p>"
    steps = sorted({step for points in places.values() for step, _ in points})
    low, high = math.log(min(values)), math.log(max(values))
    width = max(1.0, WIDTH / len(steps))
    column = {step: number for number, step in enumerate(steps)}
    drawn = []
    for row, (place, points) in enumerate(places.items()):
        drawn.append(f'<text x="{MARGIN + 20}" y="{row * CELL + 12}" text-anchor="end">{place} - {2 * place - 1}</text>')
        for step, value in points:
            share = (math.log(max(value, SMALLEST)) - low) / max(high - low, 1e-9)
            box = f'x="{MARGIN + 26 + width * column[step]:.1f}" y="{row * CELL}" width="{width:.1f}" height="{CELL}"'
            title = f"step {step}, tokens {place} to {2 * place - 1}: {value:.3g} nats"
            drawn.append(f'<rect {box} fill="rgba(238,102,119,{max(share, 0.03):.2f})"><title>{title}</title></rect>')
    return f"<p>From {min(values):.2g} to {max(values):.2g} nats; steps {steps[0]} to {steps[-1]}.</p>" + _svg(
        drawn, WIDTH + 3 * MARGIN, len(places) * CELL + 10
    )


def table(rows: Mapping[str, Points]) -> str:
    """First and last step as numbers."""
    cells = "".join(
        f"<tr><td>{escape(name)}</td><td>{points[0][1]:.3g}</td><td>{points[-1][1]:.3g}</td></tr>" for name, points in rows.items()
    )
    return f"<table><tr><th>tokens</th><th>first step</th><th>last step</th></tr>{cells}</table>"


def _numbered(pattern: re.Pattern[str], curves: Mapping[str, Points]) -> dict[int, Points]:
    """Number -> curve, of the curves whose tags have a number, in the order of the numbers."""
    return dict(sorted((int(found[1]), points) for tag, points in curves.items() if (found := pattern.fullmatch(tag))))


def _svg(drawn: Sequence[str], width: float, height: float) -> str:
    return f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-size="12">{"".join(drawn)}</svg>'


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
