"""The answer about one side: a sentence, and a table of layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from rlbatch.align.causes import weights
from rlbatch.align.causes.case import Case, Explanation
from rlbatch.align.causes.explain import explain, explain_output
from rlbatch.align.causes.router import without_ties
from rlbatch.align.values.places import ABSOLUTE, Batch, Named, Place, Row, Trace, compare, first_difference, in_words
from rlbatch.api import ModelFamily

PARTS = {
    "attention": ("input_norm", "query", "key", "value", "context", "attention"),
    "router": ("mlp_norm", "router_logits", "router_weights"),
    "mlp": ("shared_experts", "mlp"),
    "output": ("output",),
}
"""Column of the table -> places that it covers."""

BLIND = 0.5
"""Limit of rounding, as a relative difference, above which a place proves nothing, as rounding chose other experts."""


def _cell(rows: Sequence[Row]) -> str:
    largest = max((row.largest for row in rows), default=0.0)
    return f"{largest:.1e}{'*' if any(row.differs for row in rows) else ' '}" if rows else ""


@dataclass(frozen=True)
class Answer:
    """The result of the comparison of one side.

    Attributes:
        title: Title of the side.
        rows: Every place that side and baseline show, in the order of computation.
        first: First place that differs by more than rounding; None if none does.
        explanation: Explanation of ``first``.
        ties: Number of tokens whose experts rounding chose, which were left out from there on.
        batch: Tokens that were computed.
    """

    title: str
    rows: Sequence[Row]
    first: Row | None
    explanation: Explanation | None
    ties: int = 0
    batch: Batch = field(default_factory=lambda: Batch([]))

    @property
    def agrees(self) -> bool:
        """Whether no place differs by more than rounding."""
        return self.first is None

    def sentence(self, num_layers: int) -> str:
        """Sentence that names the first module that differs, the kind of difference, and the evidence."""
        tied = f" ({self.ties} tokens left out from where rounding chose their experts)" if self.ties else ""
        seen = takewhile(lambda row: self.first is None or row.place != self.first.place, self.rows)
        blind = next((row for row in seen if row.limit > BLIND and row.place[1] not in ABSOLUTE), None)
        where = in_words(blind.place, num_layers) if blind else ""
        beyond = f" From {where} on rounding may change all: no fault would show. Compare in fp32." if blind else ""
        if self.first is None or self.explanation is None:
            most = max(self.rows, key=lambda row: row.largest / row.limit)
            near = f"at most {most.largest:.1e} of {most.limit:.1e}, {in_words(most.place, num_layers)}"
            return f"{self.title}: agrees everywhere up to rounding; {near}{tied}.{beyond}"
        where, why = in_words(self.first.place, num_layers), self.explanation
        return (
            f"{self.title}: {where} is the first to differ ({self.first.largest:.1e}, rounding explains {self.first.limit:.1e}). "
            f"Kind: {why.kind}: {why.words}. How that is known: {why.how}{tied}.{beyond}"
        )

    def table(self, num_layers: int) -> list[str]:
        """Lines with the largest differences: one for each layer, by part, and one for each other place; ``*`` marks more than rounding."""
        lines = [f"{'layer':<10}" + "".join(f"{part:>12}" for part in PARTS)]
        for layer in dict.fromkeys(row.place[0] for row in self.rows):
            own = [row for row in self.rows if row.place[0] == layer]
            if 0 <= layer < num_layers:
                cells = [[row for row in own if row.place[1] in names] for names in PARTS.values()]
                lines.append(f"{layer:<10}" + "".join(f"{_cell(rows):>12}" for rows in cells))
            else:
                lines += [f"{row.place[1]:<10}{_cell([row]):>12}" for row in own]
        return lines


def answer(family: ModelFamily, batch: Batch, side: Named, want: Trace, got: Trace, limits: dict[Place, float]) -> Answer:
    """Compares a side with the baseline, and explains the first difference."""
    rows, ties = without_ties(family, batch, compare(want, got, limits), want, got)
    first = first_difference(rows)
    explanation = _explained(Case(family, batch, first.place, want, got, first.limit), first, side) if first else None
    cases = (Case(family, batch, row.place, want, got, row.limit) for row in rows)
    if first is None and (silent := weights.explain_silent(cases, side.precision)) is not None:
        first, explanation = next(row for row in rows if row.place == silent[0].place), silent[1]
    return Answer(side.title, rows, first, explanation, ties, batch)


def _explained(case: Case, first: Row, side: Named) -> Explanation:
    try:
        if (-1, "embedding") not in case.got.values:
            return explain_output(case) or _not_located(first)
        return explain(case, side.precision)
    except Exception as error:  # no memory for a candidate, above all: that there is a difference, and where, is told all the same
        return Explanation("unknown", "looking for an explanation failed", f"{type(error).__name__}: {error}")


def _not_located(first: Row) -> Explanation:
    """The explanation for a side that does not show values inside of the model."""
    count, total = int((first.errors > first.limit).sum()), len(first.errors)
    words = "the side shows neither what enters this place nor what was before it: the difference begins here or anywhere before"
    return Explanation(
        "not located", words, f"{count} of {total} tokens differ; its weights were compared with the folder's when it got them"
    )
