"""pass@k, majority@k and standard errors against other ways to compute them in float64."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter

import numpy as np
import pytest

from rlbatch.algorithms.pass_at_k import majority_at_k, mean_and_error, pass_at_k


def test_pass_at_k_is_the_share_of_subsets_with_a_correct_one() -> None:
    """Counted over all subsets of k of up to 8 samples, and by the product that Chen et al. (2021) give as code."""
    for n, c, k in ((of, c, k) for of in range(1, 9) for c in range(of + 1) for k in range(1, of + 1)):
        correct = random.Random(n * 100 + c * 10 + k).sample([True] * c + [False] * (n - c), n)
        subsets = list(itertools.combinations(correct, k))
        assert pass_at_k(correct, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-15)
        theirs = 1.0 if n - c < k else 1.0 - np.prod(1.0 - k / np.arange(n - c + 1, n + 1))
        assert pass_at_k(correct, k) == pytest.approx(theirs, abs=1e-12)


def test_pass_at_k_of_many_samples() -> None:
    """Numbers that float64 cannot hold on the way."""
    assert pass_at_k([True] + [False] * 9999, 5000) == 0.5
    assert pass_at_k([False] * 4096, 2048) == 0.0
    assert pass_at_k([True] * 4096, 1) == 1.0


@pytest.mark.parametrize("seed", range(40))
def test_majority_is_the_most_common_answers_worth(seed: int) -> None:
    """Block by block, with numpy and Counter."""
    draw = random.Random(seed)
    samples = [(draw.choice([None, "a", "b", "c"]), draw.random() < 0.5) for _ in range(draw.randint(1, 12))]
    k = draw.randint(1, len(samples))
    worth = []
    for start in range(0, len(samples) // k * k, k):
        block = [sample for sample in samples[start : start + k] if sample[0] is not None]
        counts = Counter(answer for answer, _ in block)
        winners = [answer for answer, count in counts.items() if count == max(counts.values())]
        worth.append(np.mean([np.mean([is_correct for answer, is_correct in block if answer == winner]) for winner in winners] or [0.0]))
    answers, correct = [answer for answer, _ in samples], [is_correct for _, is_correct in samples]
    assert majority_at_k(answers, correct, k) == pytest.approx(float(np.mean(worth)), abs=1e-12)


def test_majority_by_hand() -> None:
    """Two of three win; a tie is worth half; without answers nothing; what is left of the last block does not count."""
    right, wrong = ("7", True), ("8", False)
    cases = [([right, right, wrong], 3, 1.0), ([right, wrong, wrong], 3, 0.0), ([right, wrong], 2, 0.5), ([(None, False)] * 2, 2, 0.0)]
    cases += [([right, right, wrong, wrong, right], 2, 0.5), ([("7", True), ("7", False)], 2, 0.5)]
    for samples, k, expected in cases:
        assert majority_at_k([answer for answer, _ in samples], [is_correct for _, is_correct in samples], k) == expected


@pytest.mark.parametrize("seed", range(20))
def test_mean_and_standard_error(seed: int) -> None:
    """numpy's, with n - 1 below; in any order the same."""
    values = np.random.default_rng(seed).normal(scale=10.0 ** (seed % 7), size=2 + seed).tolist()
    mean, error = mean_and_error(values)
    assert mean == pytest.approx(float(np.mean(values)), rel=1e-9, abs=1e-9)
    assert error == pytest.approx(float(np.std(values, ddof=1) / math.sqrt(len(values))), rel=1e-9)
    assert mean_and_error(values[::-1]) == (mean, error)


def test_one_prompt_has_no_standard_error() -> None:
    """A mean, and NaN."""
    mean, error = mean_and_error([0.25])
    assert mean == 0.25
    assert math.isnan(error)
