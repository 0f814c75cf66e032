from __future__ import annotations

import numpy as np
import pytest

from rlbatch_plugins.advantage_rloo import rloo
from tests.plugins.advantage_cases import CASES, Case


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_baseline_is_the_mean_of_the_others(case: Case) -> None:
    """RLOO subtracts the mean of the group's other rewards; one sample keeps its reward."""
    expected = case.by_group(lambda r, _: np.array([x - np.delete(r, i).mean() for i, x in enumerate(r)]) if len(r) > 1 else r)
    np.testing.assert_allclose(rloo(case.inputs()).numpy(), expected, rtol=0, atol=1e-6)


def test_known_numbers() -> None:
    """The convention does not move: literal values of one small step."""
    expected = [2 / 3, -2 / 3, -2 / 3, 2 / 3, 1 / 12, -0.25, -7 / 12, 0.75]
    np.testing.assert_allclose(rloo(CASES["two_groups"].inputs()).numpy(), expected, rtol=0, atol=1e-6)
