"""Runs a comparison and says what came of it: sentences and tables one after the other, and the page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rlbatch.align.answer import Answer
from rlbatch.align.arguments import Options
from rlbatch.align.page import write_page
from rlbatch.align.sides import Failed, compared
from rlbatch.api import ModelFamily
from rlbatch.config.schema import LayoutConfig
from rlbatch.registry import Registry


def report(
    options: Options,
    family: ModelFamily,
    layouts: dict[str, LayoutConfig],
    tokens: Sequence[Sequence[int]],
    ranks: Callable[[int], Any],
    registry: Registry,
    say: Callable[[str], None],
    scratch: Path | None = None,
) -> bool:
    """Says what comes of each side, and writes the page if ``out`` names one.

    Args:
        options: Of the command, checked.
        family: Of the model.
        layouts: By name.
        tokens: The sequences.
        ranks: Gives the ranks of a layout of a size, see ``TrainerSide``.
        registry: Of plugins.
        say: Called with each answer.
        scratch: See ``compared``.

    Returns:
        Whether all sides ran and agree.

    Raises:
        ModelError: there is no baseline.
    """
    answers, is_right = [], True
    for found in compared(options, family, layouts, tokens, ranks, registry, scratch):
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
