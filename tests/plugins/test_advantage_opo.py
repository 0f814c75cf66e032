from __future__ import annotations

import numpy as np
import pytest

from rlbatch_plugins.advantage_opo import opo
from tests.plugins.advantage_cases import CASES, Case


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_baseline_is_weighted_by_length(case: Case) -> None:
    """OPO subtracts the group's mean reward, weighted by response tokens; one sample keeps its reward."""
    expected = case.by_group(lambda r, lengths: r - np.average(r, weights=lengths) if len(r) > 1 else r)
    np.testing.assert_allclose(opo(case.inputs()).numpy(), expected, rtol=0, atol=1e-6)


def test_known_numbers() -> None:
    """The convention does not move: literal values of one small step."""
    expected = [0.5, -0.5, -0.5, 0.5, 2 / 9, -1 / 36, -5 / 18, 13 / 18]
    np.testing.assert_allclose(opo(CASES["two_groups"].inputs()).numpy(), expected, rtol=0, atol=1e-6)
