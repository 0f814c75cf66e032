"""The soft overlong penalty: a response loses reward over its last tokens before the length limit."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def overlong_penalties(lengths: Tensor, max_length: int, buffer: int, factor: float) -> Tensor:
    """``factor x clamp((max_length - buffer - length) / buffer, -1, 0)`` (Yu et al. 2025, DAPO, arXiv 2503.14476, equation 13).

    Args:
        lengths: [N] int64, response tokens.
        max_length: Length from which on the penalty is ``-factor``.
        buffer: Tokens before ``max_length`` at which it begins.
        factor: ``algorithm.overlong_penalty``.

    Returns:
        [N] float64, to be added to rewards.
    """
    return factor * ((max_length - buffer - lengths.double()) / buffer).clamp(-1.0, 0.0)
