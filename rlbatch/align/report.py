"""Runs a comparison and says what came of it: sentences and tables one after the other, and the page."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from rlbatch.align.answer import Answer
from rlbatch.align.arguments import Options
from rlbatch.align.page import write_page
from rlbatch.align.sides import Failed, Gradients
from rlbatch.api import ModelFamily


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
