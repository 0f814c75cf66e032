"""Shows a plan as one self-contained HTML page: a stacked bar for each stage and phase, a time line of a step, and the table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from rlbatch.plan.engine_memory import GIB
from rlbatch.plan.job_plan import JobPlan
from rlbatch.plan.memory import PHASES

COLOURS = (
    *("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377"),
    *("#bbbbbb", "#000000", "#ee7733", "#009988", "#cc3311", "#997700"),
)
"""Colours of the parts, which can be told apart without full colour vision (Paul Tol's schemes)."""
WIDTH, LABEL, ROW, BAR, MARGIN = 1000, 220, 18, 13, 40


def page(plan: JobPlan, table: Sequence[str]) -> str:
    """The HTML page of a plan.

    Args:
        plan: The plan.
        table: Lines of the table that ``rlbatch.plan.report`` makes of it.
    """
    title = f"Plan: {plan.verdict}"
    parts = [
        "<!DOCTYPE html>",
        f'<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>',
        "<style>body { font: 14px sans-serif; margin: 2em } pre { font-size: 12px; white-space: pre-wrap }</style></head><body>",
        f"<h1>{escape(title)}</h1>",
        *(f"<p>{escape(str(need))}</p>" for need in plan.needs),
    ]
    if plan.job.on_gpu:
        parts += ["<h2>Memory of a GPU, GiB, by stage and phase</h2>", *_memory(plan)]
    if plan.time:
        parts += [f"<h2>A step: {plan.time.seconds:.0f} s</h2>", *_timeline(plan.time.phases)]
    parts += ["<h2>Numbers</h2>", f"<pre>{escape(chr(10).join(table))}</pre>", "</body></html>", ""]
    return "\n".join(parts)


def _memory(plan: JobPlan) -> Iterator[str]:
    """Yields a bar chart with a row for each stage and phase; equal stages share a row."""
    rows: dict[tuple[str, tuple[tuple[str, float], ...], float], list[int]] = {}
    for phase in PHASES:
        for number, stage in enumerate(plan.memory.expected.stages):
            sizes = tuple((name, round(size / GIB, 1)) for name, size in stage.gpu[phase].items() if size >= GIB / 20)
            if sizes:
                rows.setdefault((phase, sizes, round(sum(stage.gpu[phase].values()) / GIB, 1)), []).append(number)
    names = list(dict.fromkeys(name for _, sizes, _ in rows for name, _ in sizes))
    colours = {name: COLOURS[index % len(COLOURS)] for index, name in enumerate(names)}
    total = plan.job.config.cluster.gpu_memory_gib
    scale = (WIDTH - LABEL) / (max([total, *(taken for _, _, taken in rows)]) or 1)
    height = ROW * len(rows) + MARGIN
    yield f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH + MARGIN}" height="{height}" font-size="11">'
    for place, ((phase, sizes, taken), stages) in enumerate(rows.items()):
        top, left = place * ROW, float(LABEL)
        shown = f"{phase}, stage{'s' * (len(stages) > 1)} {_listed(stages)}"
        yield f'<text x="{LABEL - 8}" y="{top + BAR - 2}" text-anchor="end">{escape(shown)}</text>'
        for name, size in sizes:
            box = f'x="{left:.1f}" y="{top}" width="{size * scale:.1f}" height="{BAR}"'
            yield f'<rect {box} fill="{colours[name]}"><title>{escape(name)}: {size:.1f} GiB</title></rect>'
            left += size * scale
        yield f'<text x="{left + 4:.1f}" y="{top + BAR - 2}">{taken:.1f}</text>'
    if total:
        x, foot = LABEL + total * scale, ROW * len(rows)
        yield f'<line x1="{x:.1f}" y1="0" x2="{x:.1f}" y2="{foot}" stroke="red"/>'
        yield f'<text x="{x:.1f}" y="{foot + 14}" text-anchor="end" fill="red">{total:g} GiB a GPU</text>'
    yield "</svg>"
    yield f"<p>{' '.join(f'<span style={chr(34)}color:{colours[name]}{chr(34)}>&#9632;</span> {escape(name)}' for name in names)}</p>"


def _listed(stages: Sequence[int]) -> str:
    """Text that lists stage numbers, as a span if they are consecutive."""
    if len(stages) > 1 and stages[-1] - stages[0] == len(stages) - 1:
        return f"{stages[0]}-{stages[-1]}"
    return ", ".join(map(str, stages))


def _timeline(phases: dict[str, float]) -> Iterator[str]:
    """Yields a bar chart of a step, one bar from left to right with a line of text for each phase below."""
    total = sum(phases.values())
    yield f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH + MARGIN}" height="{ROW * (len(phases) + 2)}" font-size="11">'
    left = 0.0
    for place, (phase, seconds) in enumerate(phases.items()):
        width, colour = WIDTH * seconds / total, COLOURS[place % len(COLOURS)]
        yield f'<rect x="{left:.1f}" y="0" width="{width:.1f}" height="{ROW}" fill="{colour}"/>'
        top = ROW * (place + 2)
        yield f'<rect x="0" y="{top - 9}" width="9" height="9" fill="{colour}"/>'
        yield f'<text x="14" y="{top}">{escape(phase)}: {seconds:.1f} s from {total * left / WIDTH:.1f} s on</text>'
        left += width
    yield "</svg>"
