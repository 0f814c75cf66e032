"""Repairs of Megatron-core; those of its hybrid optimizer are checked on a GPU (``tests/gpu/offload.py``)."""

from __future__ import annotations

import pytest

from rlbatch.megatron.patches import own_cores


@pytest.mark.parametrize(
    ("bound", "there", "ranks", "cores"),
    [
        (16, 128, 8, 16),  # each rank has cores of its own
        (12, 128, 8, 12),
        (128, 128, 8, 16),  # all share the machine
        (64, 128, 8, 8),  # all share what the job has of it
        (2, 2, 4, 1),
        (32, 32, 1, 32),
    ],
)
def test_cores_of_a_rank(bound: int, there: int, ranks: int, cores: int) -> None:
    """Adam on the host runs on them: on all together no more than there are, where there are enough."""
    assert own_cores(bound, there, ranks) == cores
