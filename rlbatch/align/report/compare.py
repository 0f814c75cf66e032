"""Runs the sides of a comparison: the baseline, what rounding makes of it, and each other side beside it; and says what came of each."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from rlbatch.align.arguments import Options
from rlbatch.align.report.answer import Answer, answer
from rlbatch.align.report.page import write_page
from rlbatch.align.sides.engine import EngineSide
from rlbatch.align.sides.trainer import Task, TrainerSide, Written
from rlbatch.align.sides.transformers import TransformersSide
from rlbatch.align.values.places import Batch, Place, Side, Trace, batch_of, measured_rounding
from rlbatch.api import ModelError, ModelFamily
from rlbatch.config.schema import LayoutConfig
from rlbatch.pipeline.bare_trainer import relative_error
from rlbatch.registry import Registry

GRADIENT_LIMIT = {"fp32": 1e-5, "bf16": 5e-2}
"""Relative L2 difference of gradients that another order of addition makes (docs/measurements/gradients.md)."""


@dataclass(frozen=True)
class Failed:
    """A side that did not run.

    Attributes:
        title: The side's.
        reason: In one line.
    """

    title: str
    reason: str


@dataclass(frozen=True)
class Gradients:
    """A trainer's gradients beside those of the first layout.

    Attributes:
        agree: Whether they differ by no more than another order of addition makes.
        sentence: With the parameter whose gradient differs most.
    """

    agree: bool
    sentence: str


def compared(
    options: Options,
    family: ModelFamily,
    layouts: dict[str, LayoutConfig],
    tokens: Sequence[Sequence[int]],
    run: Callable[[Task], list[Written]],
    registry: Registry,
    scratch: Path | None = None,
) -> Iterator[Answer | Failed | Gradients]:
    """One side after the other: its answer or why it has none, and a line on its gradients.

    Args:
        options: Of the command, checked.
        family: Of the model.
        layouts: By name.
        tokens: The sequences.
        run: See ``TrainerSide``.
        registry: Of plugins.
        scratch: Where sides keep what they compute, which all ranks see; None: among the temporary files.

    Raises:
        ModelError: transformers cannot compute the baseline.
    """
    folder, batch = Path(options.hf), batch_of(tokens)
    sides: list[Side]
    if options.beside:
        sides = [TransformersSide(Path(options.beside), title=f"checkpoint {options.beside}", scratch=scratch)]
    else:
        with_gradients = options.gradients and len(layouts) > 1
        sides = [
            TrainerSide(folder, layout, name, options.precision, options.plugins, run, with_gradients=with_gradients, scratch=scratch)
            for name, layout in layouts.items()
        ]
    try:
        baseline = TransformersSide(folder, scratch=scratch).compute(batch)
        limits = rounding(folder, batch, baseline, "fp32" if options.beside else options.precision, scratch)
    except Exception as error:  # whatever transformers says to this folder
        raise ModelError(f"hf={folder}: the baseline, transformers, cannot compute it ({_last_line(error)}). Use another model.") from error
    first: tuple[str, Mapping[str, Tensor]] | None = None
    for side in sides:
        try:
            got = side.compute(batch)
        except Exception as error:  # of whatever runs there: the other sides go on
            yield Failed(side.title, _last_line(error))
            continue
        yield answer(family, batch, side, baseline, got, limits)
        if first is not None and got.gradients:
            yield _gradients(side, got.gradients, *first)
        first = first or (side.title, got.gradients)
        del got  # and its files, before the next side writes its own
    for name in options.engines:
        yield _engine(options, name, family, registry, tokens, scratch)


def _engine(
    options: Options, name: str, family: ModelFamily, registry: Registry, tokens: Sequence[Sequence[int]], parent: Path | None
) -> Answer | Failed:
    """An engine beside transformers, on what it samples."""
    folder = Path(options.hf)
    with tempfile.TemporaryDirectory(dir=parent) as scratch:
        side = EngineSide(name, folder, family, registry, options.engine.get(name, {}), options.precision, options.seed, Path(scratch))
        try:
            batch = side.sample(tokens)
            baseline = TransformersSide(folder, scratch=parent).compute(batch)
            return answer(family, batch, side, baseline, side.shown(baseline), rounding(folder, batch, baseline, options.precision, parent))
        except Exception as error:  # of whatever runs there: the other sides go on
            return Failed(side.title, _first_line(error))


def rounding(folder: Path, batch: Batch, baseline: Trace, precision: str, scratch: Path | None = None) -> dict[Place, float]:
    """What rounding explains at each place, in a precision."""
    other = TransformersSide(folder, "fp64" if precision == "fp32" else precision, scratch=scratch).compute(batch)
    return measured_rounding(other, baseline, precision) if precision == "fp32" else measured_rounding(baseline, other, precision)


def _gradients(side: Side, got: Mapping[str, Tensor], title: str, first: Mapping[str, Tensor]) -> Gradients:
    apart = {name: relative_error(got[name], want) for name, want in first.items() if name in got}
    name = max(apart, key=lambda name: apart[name])
    limit = GRADIENT_LIMIT[side.precision]
    agree = apart[name] <= limit
    verdict = "agree with" if agree else "DIFFER from"
    return Gradients(agree, f"{side.title}: gradients {verdict} those of {title}; at most {apart[name]:.1e} of {limit:.0e}, {name}.")


def _first_line(error: Exception) -> str:
    """Engines say first what is wrong, and then show their log."""
    return str(error).partition("\n")[0].strip() or type(error).__name__


def _last_line(error: Exception) -> str:
    """Of a rank's traceback the last line says what it was."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1].strip() if lines else ''}"


def report(options: Options, family: ModelFamily, found_by_side: Iterable[Answer | Failed | Gradients], say: Callable[[str], None]) -> bool:
    """Says what comes of each side, and writes the page if ``out`` names one.

    Args:
        options: Of the command, checked.
        family: Of the model.
        found_by_side: What ``compared`` yields, and raises.
        say: Called with each answer.

    Returns:
        Whether all sides ran and agree.
    """
    answers, is_right = [], True
    for found in found_by_side:
        if isinstance(found, Answer):
            answers.append(found)
            is_right &= found.first is None
            say("\n".join([found.sentence(family.num_layers), *found.table(family.num_layers), ""]))
        elif isinstance(found, Failed):
            is_right = False
            say(f"{found.title}: did not run: {found.reason}")
        else:
            is_right &= found.agree
            say(found.sentence)
    if options.out:
        write_page(Path(options.out), f"{family.name}: {options.hf}", answers, family.num_layers)
        say(f"{options.out}: curves over layers, tokens by their difference")
    return is_right
