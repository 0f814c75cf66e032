"""What several samples of a prompt say together: pass@k, majority@k, and how sure a mean over prompts is. Plain float64 arithmetic."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from fractions import Fraction


def pass_at_k(correct: Sequence[bool], k: int) -> float:
    """Probability that at least one of ``k`` of a prompt's samples, drawn without putting back, is correct.

    The unbiased estimator of Chen et al., Evaluating Large Language Models Trained on Code (2021): 1 - C(n-c, k) / C(n, k) with ``c`` of
    ``n`` samples correct; exact up to the last rounding.

    Args:
        correct: [n] of each sample; n is at least ``k``.
        k: Number of samples that are drawn, from 1.
    """
    n, wrong = len(correct), len(correct) - sum(correct)
    return float(1 - Fraction(math.comb(wrong, k), math.comb(n, k)))


def majority_at_k(answers: Sequence[Hashable | None], correct: Sequence[bool], k: int) -> float:
    """How often the answer that most of ``k`` samples give is correct: the mean over the n // k blocks of k samples, in their order.

    In a block, samples with equal answers vote together. A vote is worth the share of correct samples among those with the winning answer;
    of several answers with as many votes, the mean. Who gives no answer does not vote; a block without votes is worth 0.

    Args:
        answers: [n] of each sample; None: it gives none.
        correct: [n] of each sample.
        k: Number of samples that vote, from 1 to n.
    """
    blocks = [range(start, start + k) for start in range(0, len(answers) - k + 1, k)]
    return float(sum((_vote([(answers[i], correct[i]) for i in block]) for block in blocks), Fraction()) / len(blocks))


def _vote(block: Sequence[tuple[Hashable | None, bool]]) -> Fraction:
    votes: dict[Hashable, list[bool]] = {}
    for answer, is_correct in block:
        if answer is not None:
            votes.setdefault(answer, []).append(is_correct)
    most = max(map(len, votes.values()), default=0)
    winners = [Fraction(sum(given), most) for given in votes.values() if len(given) == most]
    return sum(winners, Fraction()) / len(winners) if winners else Fraction()


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Mean over prompts, and its standard error: sqrt(sum (x - mean)^2 / (P (P - 1))) over P prompts; NaN with one prompt.

    Args:
        values: [P] of each prompt; at least one.
    """
    count = len(values)
    mean = math.fsum(values) / count
    error = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (count * (count - 1))) if count > 1 else math.nan
    return mean, error
