"""What an engine's host says of a prompt's samples, read by the rank."""

from array import array

import pytest
import torch

from rlbatch.api import RolloutError
from rlbatch.engines.backend.answers import completions

SAID = {"lengths": [2, 1, 1], "reasons": ["stop", "length", "stop"], "policy_version": 4, "seconds": [1.0, 2.0, 3.0]}


@pytest.mark.parametrize(("kind", "dtype"), [("B", torch.uint8), ("h", torch.int16)])
def test_routes_are_as_wide_as_they_were_sent(kind: str, dtype: torch.dtype) -> None:
    """Bytes up to 256 experts, else two an expert; a sample of which the engine kept nothing has none."""
    numbers = array("i", [7, 8, 9, 5]).tobytes() + array("f", [-1, -2, -3, -4]).tobytes()
    first, last = range(2 * 3 * 2), range(200, 204)
    answer = {**SAID, "routes": [[2, 3, 2], None, [1, 2, 2]]}
    made = completions(answer, bytearray(numbers + array(kind, [*first, *last]).tobytes()))
    assert [each.token_ids for each in made] == [[7, 8], [9], [5]]
    assert [each.routes is None for each in made] == [False, True, False]
    assert made[0].routes.dtype == made[2].routes.dtype == dtype
    assert made[0].routes.tolist() == torch.arange(12).view(2, 3, 2).tolist()
    assert made[2].routes.tolist() == [[[200, 201], [202, 203]]]


@pytest.mark.parametrize("payload", [array("i", range(12)).tobytes(), bytes(13), b""])
def test_routes_of_no_known_width_are_refused(payload: bytes) -> None:
    """Four bytes each, or some of one and some of two."""
    numbers = array("i", [7, 8, 9, 5]).tobytes() + bytes(16)
    with pytest.raises(RolloutError, match="told 12 experts in"):
        completions({**SAID, "routes": [[2, 3, 2], None, None]}, bytearray(numbers + payload))


def test_samples_without_routes() -> None:
    """An engine that says nothing of them."""
    numbers = array("i", [7, 8, 9, 5]).tobytes() + array("f", [0, 0, 0, 0]).tobytes()
    made = completions({**SAID, "routes": [None] * 3}, bytearray(numbers))
    assert [(each.routes, each.policy_version) for each in made] == [(None, 4)] * 3
