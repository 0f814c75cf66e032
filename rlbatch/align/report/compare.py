"""Runs the sides of a comparison (the baseline, the measurement of rounding, and each other side), and reports each."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from rlbatch.align.arguments import Options, layouts_of, spec_of, token_lists
from rlbatch.align.report.answer import Answer, answer
from rlbatch.align.report.page import write_page
from rlbatch.align.sides.engine import EngineSide
from rlbatch.align.sides.trainer import Task, TrainerSide, Written
from rlbatch.align.sides.transformers import TransformersSide
from rlbatch.align.values.places import Batch, Place, Side, Trace, batch_of, measured_rounding
from rlbatch.api import ModelError, ModelFamily, RlbatchError
from rlbatch.pipeline.bare_trainer import relative_error
from rlbatch.registry import Registry

GRADIENT_LIMIT = {"fp32": 1e-5, "bf16": 5e-2}
"""Largest relative L2 difference of gradients that another order of addition makes (docs/measurements/gradients.md)."""


@dataclass(frozen=True)
class Line:
    """A report about a side beside its answer: that it did not run, or about its gradients.

    Attributes:
        agrees: Whether nothing is wrong.
        sentence: Text of the report.
    """

    agrees: bool
    sentence: str


def _compared(
    options: Options, family: ModelFamily, run: Callable[[Task], list[Written]], registry: Registry, scratch: Path | None
) -> Iterator[Answer | Line]:
    """Yields for one side after the other its answer, or the reason why it has none, and a line about its gradients."""
    tokens = token_lists(options, family)
    folder, batch = Path(options.hf), batch_of(tokens)
    sides: list[Side]
    if options.beside:
        sides = [TransformersSide(Path(options.beside), title=f"checkpoint {options.beside}", scratch=scratch)]
    else:
        layouts, with_gradients = layouts_of(options, family), options.gradients and len(options.layouts) > 1
        sides = [
            TrainerSide(name, Task(str(folder), layout, options.precision, options.plugins, spec_of(name), with_gradients), run, scratch)
            for name, layout in layouts.items()
        ]
    try:
        baseline = TransformersSide(folder, scratch=scratch).compute(batch)
        limits = rounding(folder, batch, baseline, "fp32" if options.beside else options.precision, scratch)
    except Exception as error:  # whatever transformers says to this folder
        raise ModelError(f"hf={folder}: the baseline, transformers, cannot compute it ({_reason(error)}). Use another model.") from error
    first: tuple[str, Mapping[str, Tensor]] | None = None
    for side in sides:
        try:
            got = side.compute(batch)
        except Exception as error:  # of whatever runs there: the other sides go on
            yield Line(False, f"{side.title}: did not run: {_reason(error)}")
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
) -> Answer | Line:
    """The answer for an engine, compared with transformers on the sequences that it samples."""
    folder = Path(options.hf)
    with tempfile.TemporaryDirectory(dir=parent) as scratch:
        side = EngineSide(name, folder, family, registry, options.engine.get(name, {}), options.precision, options.seed, Path(scratch))
        try:
            batch = side.sample(tokens)
            baseline = TransformersSide(folder, scratch=parent).compute(batch)
            return answer(family, batch, side, baseline, side.shown(baseline), rounding(folder, batch, baseline, options.precision, parent))
        except Exception as error:  # of whatever runs there: the other sides go on
            return Line(False, f"{side.title}: did not run: {_reason(error)}")


def rounding(folder: Path, batch: Batch, baseline: Trace, precision: str, scratch: Path | None = None) -> dict[Place, float]:
    """The largest difference that rounding explains at each place, measured for a precision."""
    other = TransformersSide(folder, "fp64" if precision == "fp32" else precision, scratch=scratch).compute(batch)
    return measured_rounding(other, baseline, precision) if precision == "fp32" else measured_rounding(baseline, other, precision)


def _gradients(side: Side, got: Mapping[str, Tensor], title: str, first: Mapping[str, Tensor]) -> Line:
    apart = {name: relative_error(got[name], want) for name, want in first.items() if name in got}
    name = max(apart, key=lambda name: apart[name])
    limit = GRADIENT_LIMIT[side.precision]
    agree = apart[name] <= limit
    verdict = "agree with" if agree else "DIFFER from"
    return Line(agree, f"{side.title}: gradients {verdict} those of {title}; at most {apart[name]:.1e} of {limit:.0e}, {name}.")


def _reason(error: Exception) -> str:
    """One line of an error: of our own the first, which says what is wrong; of others the last, where a rank's traceback says it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    return lines[0] if isinstance(error, RlbatchError) else f"{type(error).__name__}: {lines[-1]}"


def report(
    options: Options,
    family: ModelFamily,
    run: Callable[[Task], list[Written]],
    registry: Registry,
    say: Callable[[str], None],
    scratch: Path | None = None,
) -> bool:
    """Runs the sides, reports each, and writes the page if ``out`` names one.

    Args:
        options: Options of the command, checked.
        family: Family of the model.
        run: Computes a task on ranks; see ``TrainerSide``.
        registry: Plugins of the job.
        say: Called with the text of each answer.
        scratch: Folder that all ranks see, for values of sides; None: a temporary folder.

    Returns:
        Whether all sides ran and agree.

    Raises:
        ModelError: transformers cannot compute the baseline.
    """
    answers, is_right = [], True
    for found in _compared(options, family, run, registry, scratch):
        is_right &= found.agrees
        if isinstance(found, Answer):
            answers.append(found)
            say("\n".join([found.sentence(family.num_layers), *found.table(family.num_layers), ""]))
        else:
            say(found.sentence)
    if options.out:
        write_page(Path(options.out), f"{family.name}: {options.hf}", answers, family.num_layers)
        say(f"{options.out}: curves over layers, tokens by their difference")
    return is_right
