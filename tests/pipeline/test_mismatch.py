"""Log-prob differences by the place and the kind of a token."""

from __future__ import annotations

import pytest
import torch

from rlbatch.pipeline.mismatch import digit_tokens, means, sums_of
from rlbatch.pipeline.packing import build_pack


class Tokenizer:
    """Of eleven tokens, in a vocabulary of twelve."""

    def __len__(self) -> int:
        return 11

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str | None]:
        return [["a", "b", "c", "7", "x1", "d", "e", "f", "g", "h", None][number] for number in ids]


def test_digits() -> None:
    """Those with one anywhere; what the tokenizer does not have has none."""
    assert digit_tokens(Tokenizer(), 12).nonzero().flatten().tolist() == [3, 4]  # type: ignore[arg-type]


def test_places_and_kinds() -> None:
    """Of a response of five behind a prompt of two, and one of two, padded: means over tokens. What is prompt, padding or of an older
    policy does not count, and nothing is said of what there is none of.
    """
    tokens = [torch.tensor([0, 1, 2, 3, 5, 2, 4]), torch.tensor([1, 6, 6])]
    masks = [torch.tensor([0.0, 0, 1, 1, 1, 1, 1]), torch.tensor([0.0, 1, 1])]
    pack = build_pack([0, 1], tokens, masks, [torch.zeros(7), torch.zeros(3)], pad_multiple=4).microbatch
    pack.old_logprobs = torch.tensor([9.0, 9, 1, -2, 3, 4, 5, 9, 9, 10, 20, 9])
    expected = {"at_1": 11 / 2, "at_2": 25 / 3, "at_4": 9 / 2, "first": 11 / 2, "last": 25 / 2, "digits": 7 / 2, "repeated": 24 / 2}
    digits = digit_tokens(Tokenizer(), 12)  # type: ignore[arg-type]
    assert means(sums_of([pack], digits)) == pytest.approx({f"mismatch/diff_{name}": value for name, value in expected.items()})
    assert torch.equal(sums_of([pack, pack], digits), 2 * sums_of([pack], digits))
    pack.lags = torch.tensor([0, 0, 3, 3, 0, 0, 0, 0, 0, 0, 0, 0])
    assert means(sums_of([pack], digits))["mismatch/diff_first"] == 10
