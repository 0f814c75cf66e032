"""Rewards are called once on whole groups, and whatever is wrong with them is an error that says where."""

import asyncio
import itertools
import math
import re
import sys
from collections.abc import Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from rlbatch.api import Prompt, RewardError, Sample, SampleGroup
from rlbatch.launch.records.failures import StoppedBySignal
from rlbatch.rewards.score import score


def group(prompt_id: int, responses: Sequence[str], reward_name: str = "") -> SampleGroup:
    prompt = Prompt(prompt_id, "text", (1, 2), label="label", reward_name=reward_name)
    zeros = torch.zeros(3)
    samples = [
        Sample(prompt, index, torch.ones(3, dtype=torch.int64), zeros, zeros, response, "stop") for index, response in enumerate(responses)
    ]
    return SampleGroup(prompt, samples)


def test_each_reward_sees_its_groups_once_and_in_order() -> None:
    """Groups of two rewards interleave: each reward gets one call with its own samples in order, and values return to their samples."""
    calls: list[tuple[str, list[str]]] = []

    def reward(name: str, factor: float) -> Any:
        def compute(samples: Sequence[Sample]) -> list[float]:
            calls.append((name, [sample.response for sample in samples]))
            return [factor * float(sample.response) for sample in samples]

        return compute

    groups = [group(0, ["1", "2"]), group(1, ["3", "4"], "double"), group(2, ["5", "6"])]
    score(groups, {"single": reward("single", 1.0), "double": reward("double", 2.0), "unused": reward("unused", 0.0)}, "single")
    assert calls == [("single", ["1", "2", "5", "6"]), ("double", ["3", "4"])]
    assert [g.rewards for g in groups] == [[1.0, 2.0], [6.0, 8.0], [5.0, 6.0]]


def test_numbers_of_other_types_become_floats() -> None:
    """Booleans, integers, decimals, NumPy and zero-dimensional torch values are numbers; a tensor, an array and a generator
    of all values are sequences.
    """
    groups = [group(0, ["a", "b", "c", "d"])]
    score(groups, {"r": lambda samples: [True, 2, np.float32(0.5), torch.tensor(0.25)]}, "r")
    assert groups[0].rewards == [1.0, 2.0, 0.5, 0.25]
    assert all(type(value) is float for value in groups[0].rewards)
    for values in (
        torch.arange(4.0, requires_grad=True),
        torch.arange(4, dtype=torch.bfloat16),
        np.arange(4),
        range(4),
        (Decimal(i) for i in range(4)),
        {"a": 0, "b": 1, "c": 2, "d": 3}.values(),
        [np.bool_(False), Fraction(1), np.float64(2), np.longdouble(3)],
    ):
        score(groups, {"r": lambda samples, values=values: values}, "r")
        assert groups[0].rewards == [0.0, 1.0, 2.0, 3.0]
        assert all(type(value) is float for value in groups[0].rewards)


def test_what_a_reward_raises_is_named_and_chained() -> None:
    """The error has the reward, the exception's type and text, its line and the samples; the cause is kept."""

    def broken(samples: Sequence[Sample]) -> list[float]:
        raise KeyError("gold")

    with pytest.raises(RewardError, match=r"reward=r: raised KeyError: 'gold' \(test_score\.py:\d+\)") as caught:
        score([group(7, ["a", "b"])], {"r": broken}, "r")
    assert "2 samples (prompt 7 sample 0 to prompt 7 sample 1)" in str(caught.value)
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_generator_that_raises_is_named_too() -> None:
    """A reward may yield its values; what it raises on the way is still its error."""

    def broken(samples: Sequence[Sample]) -> Any:
        yield 1.0
        raise ZeroDivisionError("division by zero")

    with pytest.raises(RewardError, match=r"reward=r: raised ZeroDivisionError"):
        score([group(0, ["a", "b"])], {"r": broken}, "r")


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ([1.0] * 7, "reward=r: returned 7 values for 8 samples"),
        ([1.0] * 9, "reward=r: returned 9 values for 8 samples"),
        (None, "reward=r: returned NoneType for 8 samples"),
        (1.0, "reward=r: returned float for 8 samples"),
        ([1.0] * 5 + [math.nan] * 3, "reward=r: returned nan for prompt 4 sample 1: must be finite"),
        ([1.0] * 7 + [-math.inf], "reward=r: returned -inf for prompt 4 sample 3: must be finite"),
        ([1e39] + [1.0] * 7, "reward=r: returned 1e+39 for prompt 3 sample 0: must be finite, and at most 3.4e+38"),
        ([10**5000] + [1.0] * 7, "returned inf for prompt 3 sample 0: must be finite"),
        ([2**53 + 1] + [1.0] * 7, "returned 9007199254740993 for prompt 3 sample 0: float64 holds 9007199254740992 instead"),
        ([np.int64(2**53 + 1)] + [1.0] * 7, "for prompt 3 sample 0: float64 holds 9007199254740992 instead"),
        ([1.0, None] + [1.0] * 6, "reward=r: returned None (NoneType) for prompt 3 sample 1: not a number"),
        ([1.0] * 4 + ["0.5"] + [1.0] * 3, "reward=r: returned '0.5' (str) for prompt 4 sample 0: not a number"),
        ([torch.zeros(2)] * 8, "(Tensor) for prompt 3 sample 0: not a number"),
        ([torch.zeros(1)] * 8, "(Tensor) for prompt 3 sample 0: not a number"),
        ([[1.0]] * 8, "returned [1.0] (list) for prompt 3 sample 0: not a number"),
        ([1j] * 8, "returned 1j (complex) for prompt 3 sample 0: not a number"),
        (np.full(8, 1j), "returned 1j (complex) for prompt 3 sample 0: not a number"),
        (np.full(8, np.timedelta64(1, "s")), "(timedelta) for prompt 3 sample 0: not a number"),
        (["1"] * 8, "returned '1' (str) for prompt 3 sample 0: not a number"),
        ([Decimal("NaN")] * 8, "must be finite, and at most"),
        (dict.fromkeys(range(8), 1.0), "reward=r: returned dict for 8 samples"),
        (dict.fromkeys(range(8), 1.0).keys(), "reward=r: returned dict_keys for 8 samples"),
        (set(range(8)), "reward=r: returned set for 8 samples"),
        (frozenset(range(8)), "reward=r: returned frozenset for 8 samples"),
        ("12345678", "reward=r: returned str for 8 samples"),
        (b"12345678", "reward=r: returned bytes for 8 samples"),
        (torch.zeros(8, 1), "reward=r: returned Tensor of shape [8, 1] for 8 samples"),
        (np.zeros((8, 1)), "reward=r: returned ndarray of shape [8, 1] for 8 samples"),
        (torch.tensor(1.0), "reward=r: returned Tensor of shape [] for 8 samples"),
        (itertools.count(), "reward=r: returned 9 values for 8 samples"),
    ],
)
def test_wrong_values_are_refused(returned: Any, message: str) -> None:
    """A wrong count, NaN, infinity, None and anything else that is no number is an error with the prompt and the sample."""
    groups = [group(3, ["a"] * 4), group(4, ["a"] * 4)]
    with pytest.raises(RewardError, match=re.escape(message)):
        score(groups, {"r": lambda samples: returned}, "r")
    assert groups[0].rewards == groups[1].rewards == []


def test_an_async_reward_is_awaited() -> None:
    """Its values are those of any other."""

    async def reward(samples: Sequence[Sample]) -> list[float]:
        await asyncio.sleep(0)
        return [1.0] * len(samples)

    scored = group(0, ["a"])
    score([scored], {"r": reward}, "r")
    assert scored.rewards == [1.0]


def test_an_unknown_reward_of_a_row_is_refused() -> None:
    """The error names the reward, the prompt that asked for it and what there is."""
    with pytest.raises(RewardError, match=r"reward=mth: not registered, but prompt 5 needs it\. Known: math, sequence"):
        score([group(5, ["a"], "mth")], {"sequence": lambda samples: [0.0], "math": lambda samples: [0.0]}, "sequence")


def test_a_reward_that_exits_is_an_error() -> None:
    """sys.exit(0) in a reward must not end the job as if it had succeeded; the signal handler's exit passes through."""
    with pytest.raises(RewardError, match=r"reward=r: raised SystemExit: 0"):
        score([group(0, ["a"])], {"r": lambda samples: sys.exit(0)}, "r")

    def stopped(samples: Sequence[Sample]) -> list[float]:
        raise StoppedBySignal(143)

    with pytest.raises(StoppedBySignal):
        score([group(0, ["a"])], {"r": stopped}, "r")


def test_what_a_reward_writes_stays_with_it() -> None:
    """A reward that edits the tensors of its samples does not change what is trained on."""

    def editing(samples: Sequence[Sample]) -> list[float]:
        for sample in samples:
            sample.loss_mask += 1
            sample.token_ids += 1
            sample.rollout_logprobs += 1
        return [0.0] * len(samples)

    scored = group(0, ["a", "b"])
    score([scored], {"r": editing}, "r")
    assert all(s.loss_mask.sum() == 0 and s.rollout_logprobs.sum() == 0 and s.token_ids.sum() == 3 for s in scored.samples)
