"""What embeddings would hold if tokens were looked up otherwise."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from rlbatch.align.case import Candidate, Case
from rlbatch.align.part_causes import MOST_VALUES


def of_table(case: Case) -> Iterator[Candidate]:
    """Rows of other tokens, or of none; positions added."""
    want, got, tokens = case.value("embedding"), case.got.values[case.place].double(), case.batch.tokens
    positions = case.batch.positions
    counts = torch.bincount(positions)
    offsets = torch.zeros(len(counts), want.shape[1], dtype=torch.float64).index_add_(0, positions, got - want) / counts[:, None]
    often = counts[positions] > 1  # where a position comes once, any vector fits
    yield Candidate("bias", "a vector of each position is added (learned positions)", (want + offsets[positions])[often], often)
    (table,) = case.names("embedding.word_embeddings.weight")
    rows = case.want.weights[table]
    if rows.numel() > MOST_VALUES:
        return
    rows = torch.cat([rows.double(), torch.zeros(1, rows.shape[1])])
    ids = torch.cdist(got, rows).argmin(1)
    yield Candidate("vocabulary", _words(tokens, ids, len(rows) - 1), rows[ids])


def _words(tokens: Tensor, ids: Tensor, count: int) -> str:
    """What became of the tokens' ids; ``count`` is a row of zeros."""
    shift = (ids - tokens) % count
    if bool((ids < count).all()) and bool((shift == shift[0]).all()):
        return f"each token has the row of id {'+' if shift[0] < count / 2 else '-'} {int(min(shift[0], count - shift[0]))}"
    wrong = {int(token): int(row) for token, row in zip(tokens, ids, strict=True) if token != row}
    said = [f"{token} has {'zeros' if row == count else f'the row of {row}'}" for token, row in sorted(wrong.items())]
    return f"of {len(wrong)} tokens: {', '.join(said[:4])}{', ...' * (len(said) > 4)}"
