"""Tokens that went to other experts because two were equally good up to rounding: from there on nothing can be said of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from rlbatch.align.case import Case
from rlbatch.align.comparison import Row
from rlbatch.align.places import Batch, Capture
from rlbatch.api import ModelFamily

MOST = 0.1
"""Part of the tokens that may be left out; more are no accident."""


def without_ties(family: ModelFamily, batch: Batch, rows: Sequence[Row], want: Capture, got: Capture) -> tuple[list[Row], int]:
    """The rows with differences of 0 at such tokens, and behind them in their sequence; and how many tokens these are.

    Args:
        family: Of the model.
        batch: What was computed.
        rows: In the order of computation.
        want: The baseline's values.
        got: The side's.
    """
    left_out, logits_limit = torch.zeros(len(batch.tokens), dtype=torch.bool), 0.0
    kept = []
    for row in rows:
        if row.place[1] == "router_logits":
            logits_limit = row.limit
        if row.place[1] == "router_weights" and row.differs:
            left_out = left_out | _tied(Case(family, batch, row.place, want, got, row.limit), logits_limit)
        kept.append(replace(row, errors=row.errors.masked_fill(left_out, 0.0)))
        if row.place[1] == "mlp":
            left_out = _and_behind(batch, left_out)  # attention of the next layer
    count = int(left_out.sum())
    return (kept, count) if count <= MOST * len(left_out) else (list(rows), 0)


def _tied(case: Case, limit: float) -> Tensor:
    """[T] where experts differ whose scores rounding cannot tell apart."""
    ours, theirs = case.got.values[case.place] != 0, case.want.values[case.place] != 0
    if ours.shape != theirs.shape or not case.has("router_logits"):
        return torch.zeros(len(theirs), dtype=torch.bool)
    logits = case.value("router_logits")
    scores = logits.sigmoid() if case.family.transformer.get("moe_router_score_function") == "sigmoid" else logits
    for bias in case.weights("mlp.router.expert_bias"):
        scores = scores + bias
    lost, won = theirs & ~ours, ours & ~theirs
    worst = scores.masked_fill(~lost, -torch.inf).amax(1) - scores.masked_fill(~won, torch.inf).amin(1)
    return lost.any(1) & won.any(1) & (worst.abs() <= limit * logits.abs().amax(1).clamp(min=1.0))


def _and_behind(batch: Batch, tokens: Tensor) -> Tensor:
    """[T] with all that come later in the sequences of these."""
    earlier = (batch.owners[:, None] == batch.owners) & (batch.positions[:, None] >= batch.positions)
    return (earlier & tokens).any(1)
