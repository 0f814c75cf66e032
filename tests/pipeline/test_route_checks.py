"""Routes of an engine that cannot be right are refused before anything is trained on them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlbatch.api import RolloutError
from rlbatch.pipeline.route_checks import Routers

ROUTERS = Routers((1, 3), 6, 2, depth=5)
GOOD = torch.tensor([[[0, 1], [5, 2]], [[-1, -1], [-1, -1]], [[4, 3], [0, 5]]])


@pytest.mark.parametrize("dtype", [torch.int16, torch.int64, torch.int8])
def test_what_is_known(dtype: torch.dtype) -> None:
    """Of tokens that the engine read, in the smallest integers; not of those that it left out in between, or at the end."""
    routes = ROUTERS.checked("it has", GOOD.to(dtype), 5)
    assert routes.experts.dtype == torch.uint8
    assert routes.known.tolist() == [True, False, True, False, False]
    assert routes.experts[routes.known].tolist() == GOOD[[0, 2]].tolist()
    assert len(routes.experts) == 5


@pytest.mark.parametrize(("experts", "dtype"), [(256, torch.uint8), (257, torch.int16)])
def test_the_last_expert_has_room(experts: int, dtype: torch.dtype) -> None:
    """257 do not go into a byte."""
    routes = Routers((0,), experts, 1, depth=1).checked("it has", torch.tensor([[[experts - 1]]]), 1)
    assert routes.experts.dtype == dtype
    assert routes.experts.tolist() == [[[experts - 1]]]


def test_layers_without_experts_are_left_out() -> None:
    """An engine may tell zeros of them."""
    every = torch.zeros(3, 5, 2, dtype=torch.int64)
    every[:, [1, 3]] = GOOD
    routes, expected = (ROUTERS.checked("it has", each, 3) for each in (every, GOOD))
    assert routes.experts.equal(expected.experts)
    assert routes.known.equal(expected.known)


def test_no_routes_are_none() -> None:
    """Of a sample without routes, they have the form of the others."""
    assert ROUTERS.unknown(3).known.tolist() == [False] * 3
    assert ROUTERS.unknown(3).experts.shape == ROUTERS.checked("it has", GOOD, 3).experts.shape


def changed(place: tuple[int, ...], value: int) -> torch.Tensor:
    routes = GOOD.clone()
    routes[place] = value
    return routes


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            GOOD.float(),
            r"it has routes torch.float32 \[3, 2, 2\]; must be integers of at most 3 tokens, 2 layers with experts and 2 experts",
        ),
        (GOOD.tolist(), r"it has routes list; must be integers"),
        (GOOD[:, :1], r"routes torch.int64 \[3, 1, 2\]"),
        (GOOD.repeat(1, 2, 1), r"routes torch.int64 \[3, 4, 2\]"),
        (GOOD[..., :1], r"routes torch.int64 \[3, 2, 1\]"),
        (GOOD.repeat(2, 1, 1), r"routes torch.int64 \[6, 2, 2\]; must be integers of at most 3 tokens"),
        (changed((0, 1, 0), 6), r"it has routes to experts 0 to 6; the model has 0 to 5 in a layer \(redundant experts"),
        (changed((2, 1, 1), -1), r"it has routes to experts -1 to 5"),
        (torch.zeros(3, 2, 2, dtype=torch.int32), r"it has a token that layer 1 routed to \[0, 0\]; must be 2 different experts"),
        (changed((2, 1, 0), 5), r"it has a token that layer 3 routed to \[5, 5\]"),
    ],
)
def test_what_cannot_be_right_is_refused(given: Any, said: str) -> None:
    """Of another model, or of none: all zeros, too."""
    with pytest.raises(RolloutError, match=said):
        ROUTERS.checked("it has", given, 3)
