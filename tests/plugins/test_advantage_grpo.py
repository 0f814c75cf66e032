from __future__ import annotations

import numpy as np
import pytest

from rlbatch_plugins.advantage_grpo import GrpoOptions, build_grpo, dr_grpo
from tests.plugins.advantage_cases import CASES, Case

grpo = build_grpo(GrpoOptions())


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_grpo_divides_by_the_sample_std(case: Case) -> None:
    """GRPO is (r - mean) / (std + 1e-6) with ddof 1 in each group; one sample keeps its reward."""
    expected = case.by_group(lambda r, _: (r - r.mean()) / (r.std(ddof=1) + 1e-6) if len(r) > 1 else r)
    np.testing.assert_allclose(grpo(case.inputs()).numpy(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_dr_grpo_only_centres(case: Case) -> None:
    """Dr. GRPO is r - mean in each group; one sample keeps its reward."""
    expected = case.by_group(lambda r, _: r - r.mean() if len(r) > 1 else r)
    np.testing.assert_allclose(dr_grpo(case.inputs()).numpy(), expected, rtol=0, atol=1e-6)


def test_known_numbers() -> None:
    """The convention does not move: literal values of one small step."""
    expected = [0.8660239, -0.8660239, -0.8660239, 0.8660239, 0.1463847, -0.4391540, -1.0246927, 1.3174621]
    np.testing.assert_allclose(grpo(CASES["two_groups"].inputs()).numpy(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("std", ["group", "batch"])
def test_without_an_eps(std: str) -> None:
    """Equal rewards and a sample that is alone are divided by nothing small, also where everything is equal."""
    estimator = build_grpo(GrpoOptions(eps=0.0, std=std))  # type: ignore[arg-type]
    assert estimator(Case([1.0, 1.0, 1.0], [2, 1], [1, 2, 3]).inputs()).tolist() == [0, 0, 1]
    assert estimator(Case([2.0], [1], [3]).inputs()).tolist() == [2]
