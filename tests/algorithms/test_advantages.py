from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from rlbatch.algorithms.advantages import Advantages, advantage_inputs, token_advantages
from rlbatch.api import AdvantageInputs, ModelError, PluginError

REWARDS = torch.tensor([1.0, 0.0, 0.5], dtype=torch.float64)
GROUPS = torch.tensor([4, 4, 2])
LENGTHS = torch.tensor([2, 1, 3])


def test_the_reward_is_on_the_last_token() -> None:
    """Without a penalty the token rewards are the rewards, on the last token of each sample, and nothing is rounded."""
    inputs = advantage_inputs(REWARDS, GROUPS, LENGTHS)
    assert inputs.token_rewards.tolist() == [0, 1, 0, 0, 0, 0.5]
    assert torch.equal(inputs.rewards, REWARDS)


def test_the_kl_penalty_is_subtracted_once() -> None:
    """A sample's reward falls by coefficient x the sum of its KL, token by token, and both views of the reward agree."""
    kl = torch.tensor([0.1, 0.2, 0.4, -0.1, 0.0, 0.3])
    inputs = advantage_inputs(REWARDS, GROUPS, LENGTHS, kl, kl_reward_coef=0.5)
    torch.testing.assert_close(inputs.token_rewards, torch.tensor([-0.05, 0.9, -0.2, 0.05, 0.0, 0.35]).double())
    torch.testing.assert_close(inputs.rewards, torch.tensor([0.85, -0.2, 0.4]).double())
    assert torch.equal(REWARDS, torch.tensor([1.0, 0.0, 0.5]).double())


def test_an_answer_a_sample_is_given_to_each_token() -> None:
    """[N] is repeated over response tokens, [T] is taken as it is, both as float32; integers are numbers too."""
    inputs = advantage_inputs(REWARDS, GROUPS, LENGTHS)
    per_sample = token_advantages("own", lambda i: i.rewards, inputs)
    assert per_sample.tokens().tolist() == [1, 1, 0, 0.5, 0.5, 0.5]
    assert [per_sample[index].tolist() for index in range(3)] == [[1, 1], [0], [0.5, 0.5, 0.5]]
    per_token = token_advantages("own", lambda i: i.token_rewards, inputs)
    assert per_token.values.dtype == torch.float32
    assert torch.equal(per_token.tokens(), inputs.token_rewards.float())
    assert [per_token[index].tolist() for index in range(3)] == [[0, 1], [0], [0, 0, 0.5]]
    assert token_advantages("own", lambda i: i.group_ids, inputs).tokens().tolist() == [4, 4, 4, 2, 2, 2]


def test_means_are_over_tokens() -> None:
    """Of the advantages, and of their size, however they are held; of none 0. Samples that are left out have no advantage."""
    for values in (torch.tensor([1.0, -2.0]), torch.tensor([1.0, 1.0, 1.0, -2.0])):
        advantages = Advantages(values, torch.tensor([3, 1]), [2, 5])
        assert advantages.means() == (0.25, 1.25)
        assert [advantages[index].tolist() for index in (2, 3, 5)] == [[1, 1, 1], [], [-2]]
    assert Advantages(torch.empty(0), torch.empty(0, dtype=torch.int64), []).means() == (0, 0)


def test_token_rewards_are_made_when_they_are_read() -> None:
    """Once, so that an estimator may write into them, and whatever it wrote into the rewards; a copy of the inputs has them too."""
    inputs = advantage_inputs(REWARDS, GROUPS, LENGTHS)
    inputs.rewards.fill_(7)
    assert replace(inputs, truncated=inputs.truncated).token_rewards.tolist() == [0, 1, 0, 0, 0, 0.5]
    inputs.token_rewards[0] = 3
    assert inputs.token_rewards.tolist() == [3, 1, 0, 0, 0, 0.5]


def test_what_an_estimator_writes_stays_with_it() -> None:
    """An estimator may use its inputs as scratch memory: the step's rewards, groups and lengths stay, and so does its answer's meaning."""
    rewards, groups, lengths = REWARDS.clone(), GROUPS.clone(), LENGTHS.clone()

    def writing(inputs: AdvantageInputs) -> torch.Tensor:
        for values in (inputs.rewards, inputs.group_ids, inputs.lengths, inputs.token_rewards):
            values.fill_(1)
        return torch.arange(3.0).requires_grad_()

    advantages = token_advantages("own", writing, advantage_inputs(rewards, groups, lengths))
    assert advantages.tokens().tolist() == [0, 0, 1, 2, 2, 2]
    assert not advantages.values.requires_grad
    for kept, given in ((rewards, REWARDS), (groups, GROUPS), (lengths, LENGTHS)):
        assert torch.equal(kept, given)


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (torch.zeros(2), r"shape \[2\]"),
        (torch.zeros(3, 1), r"shape \[3, 1\]"),
        (torch.tensor(0.0), r"shape \[\]"),
        ([0.0, 0.0, 0.0], "list"),
        (None, "NoneType"),
        (torch.zeros(3, dtype=torch.complex64), r"a tensor of torch\.complex64 \(torch\.strided, cpu\)"),
        (torch.zeros(3).to_sparse(), r"a tensor of torch\.float32 \(torch\.sparse_coo, cpu\)"),
        (torch.zeros(3, device="meta"), r"a tensor of torch\.float32 \(torch\.strided, meta\)"),
    ],
)
def test_what_is_no_advantage_is_refused(answer: Any, told: str) -> None:
    """An estimator that returns another shape, or no real tensor, is named, with both shapes that fit."""
    with pytest.raises(
        PluginError, match=rf"algorithm\.advantage=own: returned {told} for 3 samples .* Return a real tensor \[3\] or \[6\]\."
    ):
        token_advantages("own", lambda i: answer, advantage_inputs(REWARDS, GROUPS, LENGTHS))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("size", [3, 6])
def test_values_that_are_not_finite_are_refused(value: float, size: int) -> None:
    """An estimator that returns NaN or infinity stops the job instead of the model; sample, reward and the range of rewards are told."""
    answer = torch.zeros(size)
    answer[-1] = value
    with pytest.raises(PluginError) as caught:
        token_advantages("own", lambda i: answer, advantage_inputs(REWARDS, GROUPS, LENGTHS), "prompt 7 sample {}".format)
    assert str(caught.value) == (
        f"algorithm.advantage=own: 1 of {size} advantages are not finite, the first is {value} for prompt 7 sample 2, whose reward is 0.5; "
        "rewards go from 0 to 1. Fix the estimator: all rewards are finite."
    )


@pytest.mark.parametrize("kl", [float("nan"), float("inf")])
def test_a_kl_that_is_not_finite_is_not_the_estimators_fault(kl: float) -> None:
    """The sample is told."""
    inputs = advantage_inputs(REWARDS, GROUPS, LENGTHS, torch.tensor([0.0, kl, 0.0, 0.0, 0.0, 0.0]), 0.1)
    with pytest.raises(ModelError, match=r"^algorithm\.kl_reward_coef: the reward of sample 0 less its KL must be finite"):
        token_advantages("own", lambda i: i.rewards, inputs)


def test_advantages_beyond_float32_are_the_rewards_fault() -> None:
    """An answer that is finite, but not as float32, blames the rewards that it follows from, with numbers."""
    inputs = advantage_inputs(torch.tensor([-3e38, 3e38, 0.0], dtype=torch.float64), GROUPS, LENGTHS)
    with pytest.raises(PluginError) as caught:
        token_advantages("own", lambda i: i.in_groups()[0], inputs)
    assert str(caught.value) == (
        "algorithm.advantage=own: 1 of 3 advantages are beyond float32 (3.4e+38), the first is 6e+38 for sample 1, whose reward is 3e+38; "
        "rewards go from -3e+38 to 3e+38. Scale the rewards."
    )


def test_rewards_in_groups() -> None:
    """Relative to the first of the group, one sample alone as it is; the group's number and size, whatever its id."""
    inputs = advantage_inputs(torch.tensor([1e15, 1e15 + 1, 7.5], dtype=torch.float64), GROUPS, LENGTHS)
    rewards, group, sizes = inputs.in_groups()
    assert rewards.tolist() == [0, 1, 7.5]
    assert group.tolist() == [1, 1, 0]
    assert sizes.tolist() == [1, 2]
