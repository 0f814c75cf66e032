"""What a policy loss returns is checked, and nothing at a masked position gets into the loss or its gradient."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from rlbatch.algorithms.objective import SUMS, LossPart, Objective
from rlbatch.api import Microbatch, PluginError, PolicyLossInputs, PolicyLossOutputs
from rlbatch.config.schema import AlgorithmConfig

MASK = torch.tensor([0.0, 1.0, 1.0, 0.0, 1.0])
ADVANTAGES = torch.tensor([0.0, 1.0, -2.0, 0.0, 0.5])
LOGPROBS = torch.tensor([-1.0, -2.0, -0.5, -3.0, -1.5])


def part_of(
    policy_loss: Callable[[PolicyLossInputs], Any], logprobs: torch.Tensor = LOGPROBS, lags: torch.Tensor | None = None, **algorithm: Any
) -> tuple[LossPart, torch.Tensor]:
    """The objective's answer for five tokens, two of them masked, and the gradient of the log-probs."""
    leaf = logprobs.clone().requires_grad_()
    batch = Microbatch(
        token_ids=torch.arange(10),  # of both context-parallel ranks; the others are this one's
        cu_seqlens=torch.tensor([0, 3, 5]),
        loss_mask=MASK,
        advantages=ADVANTAGES,
        rollout_logprobs=LOGPROBS * MASK,
        sequence_ids=torch.tensor([0, 0, 0, 1, 1]),
        sampled_tokens=torch.tensor([2.0, 1.0]),
        truncated=torch.tensor([False, True]),
        old_logprobs=LOGPROBS * MASK,
        lags=lags,
    )
    part = Objective(AlgorithmConfig(loss="own", **algorithm), policy_loss)(leaf, leaf * 0.1, batch, 3.0)
    part.loss.backward()
    assert leaf.grad is not None
    return part, leaf.grad


def plain(inputs: PolicyLossInputs) -> PolicyLossOutputs:
    return PolicyLossOutputs(-inputs.advantages * (inputs.logprobs - inputs.old_logprobs).exp(), torch.zeros_like(inputs.logprobs))


def test_values_and_gradient() -> None:
    """The mean over unmasked tokens; at a ratio of 1 the gradient is the weighted advantage."""
    part, gradient = part_of(plain)
    assert float(part.loss.detach()) == pytest.approx(0.5 / 3)
    torch.testing.assert_close(gradient, -ADVANTAGES / 3)
    assert dict(zip(SUMS, part.sums.tolist(), strict=True))["loss"] == pytest.approx(0.5 / 3)


def test_a_loss_sees_how_old_tokens_are() -> None:
    """As the pack says."""
    seen: list[PolicyLossInputs] = []

    def looks(inputs: PolicyLossInputs) -> PolicyLossOutputs:
        seen.append(inputs)
        return plain(inputs)

    for lags in (None, torch.tensor([0, 2, 0, 0, 1])):
        part_of(looks, LOGPROBS + 0.25, lags=lags)
    assert [inputs.lags.tolist() for inputs in seen if inputs.lags is not None] == [[0] * 5, [0, 2, 0, 0, 1]]


def test_a_response_s_share_of_tokens() -> None:
    """A mean of bools or integers is the mean, not rounded to their type; masked tokens do not count."""
    seen: list[list[list[float]]] = []

    def looks(inputs: PolicyLossInputs) -> PolicyLossOutputs:
        values = (inputs.advantages > 0, (inputs.advantages > 0).long(), (inputs.advantages > 0).float())
        seen.append([inputs.sequences.mean(each).tolist() + inputs.sequences.sum(each).tolist() for each in values])
        return plain(inputs)

    part_of(looks)
    assert seen == [[[0.5, 0.5, 0.5, 1, 1, 1, 1, 1, 1, 1]] * 3]


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_masked_positions_are_ignored(broken: float) -> None:
    """A loss that is NaN or infinite at masked positions, where its inputs hold 0, and whose gradient is so too, gives the same numbers."""

    def divides(inputs: PolicyLossInputs) -> PolicyLossOutputs:
        outputs = plain(inputs)
        unit = (
            (inputs.logprobs / inputs.old_logprobs)
            if math.isnan(broken)
            else (inputs.old_logprobs.abs().log() * inputs.logprobs).detach() * 0 + 1
        )
        assert not unit.isfinite().all()
        return PolicyLossOutputs(outputs.losses * unit, torch.full_like(outputs.losses, broken).where(inputs.old_logprobs == 0, 0.0))

    part, gradient = part_of(divides, LOGPROBS.where(MASK > 0, broken), entropy_coef=0.1)
    assert part.sums.isfinite().all()
    assert gradient.isfinite().all()
    assert not gradient[MASK == 0].any()
    assert all(values.isfinite().all() for values in part.values.values())


def test_what_a_loss_writes_stays_with_it() -> None:
    """A loss may use its inputs as scratch memory."""

    def writing(inputs: PolicyLossInputs) -> PolicyLossOutputs:
        outputs = plain(inputs)
        for values in (inputs.old_logprobs, inputs.rollout_logprobs, inputs.advantages):
            values.data.fill_(7.0)
        inputs.logprobs.data.zero_()
        return outputs

    expected, _ = part_of(plain)
    part, got = part_of(writing)
    assert torch.equal(part.sums, expected.sums)
    assert torch.equal(part.values["advantage"], ADVANTAGES)
    assert got.isfinite().all()


def test_a_backward_pass_of_its_own_does_not_reach_the_model() -> None:
    """The policy is trained on what the loss returned, once."""

    def own(inputs: PolicyLossInputs) -> PolicyLossOutputs:
        outputs = plain(inputs)
        outputs.losses.sum().backward(retain_graph=True)
        return outputs

    expected, gradient = part_of(plain, entropy_coef=0.1)
    part, got = part_of(own, entropy_coef=0.1)
    assert torch.equal(got, gradient)
    assert torch.equal(part.loss, expected.loss)


def losses_of(change: Callable[[torch.Tensor], Any]) -> Callable[[PolicyLossInputs], PolicyLossOutputs]:
    return lambda inputs: PolicyLossOutputs(change(plain(inputs).losses), torch.zeros_like(inputs.logprobs))


def clipped_of(clipped: Any) -> Callable[[PolicyLossInputs], PolicyLossOutputs]:
    return lambda inputs: PolicyLossOutputs(plain(inputs).losses, clipped)


@pytest.mark.parametrize(
    ("policy_loss", "told"),
    [
        (losses_of(lambda losses: losses.unsqueeze(-1)), r"losses has shape \[5, 1\] on cpu\. Return \[5\] on cpu: one value a token"),
        (losses_of(lambda losses: losses.unsqueeze(0)), r"losses has shape \[1, 5\]"),
        (losses_of(lambda losses: losses.sum()), r"losses has shape \[\]"),
        (losses_of(lambda losses: losses[:1]), r"losses has shape \[1\]"),
        (losses_of(lambda losses: losses.to("meta")), r"losses has shape \[5\] on meta"),
        (losses_of(lambda losses: losses.to_sparse()), r"losses has shape \[5\] on cpu, sparse\. Return \[5\] on cpu"),
        (losses_of(lambda losses: losses.detach()), "losses carry no gradient"),
        (losses_of(lambda losses: losses.detach() * torch.ones(5, requires_grad=True)), "losses carry no gradient"),
        (losses_of(lambda losses: losses.bfloat16()), r"losses is of torch\.bfloat16\. Return torch\.float32"),
        (losses_of(lambda losses: losses.to(torch.complex64)), r"losses is of torch\.complex64"),
        (losses_of(lambda losses: losses.tolist()), r"losses is list\. Return a tensor \[5\]"),
        (losses_of(lambda losses: None), r"losses is NoneType"),
        (clipped_of(None), "clipped is NoneType"),
        (clipped_of(0.0), "clipped is float"),
        (clipped_of(torch.zeros(())), r"clipped has shape \[\]"),
        (clipped_of(torch.zeros(5, 1)), r"clipped has shape \[5, 1\]"),
        (lambda inputs: plain(inputs).losses, "returned Tensor"),
        (lambda inputs: (plain(inputs).losses, torch.zeros(5)), "returned tuple"),
        (lambda inputs: {"losses": plain(inputs).losses}, "returned dict"),
        (lambda inputs: None, r"returned NoneType\. Return PolicyLossOutputs"),
    ],
)
def test_what_is_no_loss_is_refused(policy_loss: Callable[[PolicyLossInputs], Any], told: str) -> None:
    """Another type, shape, precision or device would broadcast or round; without a gradient only the other terms would train."""
    with pytest.raises(PluginError, match=rf"^algorithm\.loss=own: {told}"):
        part_of(policy_loss, entropy_coef=0.1)


def test_other_types_that_lose_nothing() -> None:
    """Losses in float64 and a clip mask of booleans are taken."""
    expected, _ = part_of(plain)
    part, _ = part_of(lambda inputs: PolicyLossOutputs(plain(inputs).losses.double(), inputs.advantages > 0))
    assert part.loss.dtype == torch.float32
    assert part.sums[: SUMS.index("clip_fraction")].tolist() == pytest.approx(expected.sums[: SUMS.index("clip_fraction")].tolist())
    assert part.sums[SUMS.index("clip_fraction")] == 2


def test_derivatives_that_are_not_finite_are_kept_for_the_message() -> None:
    """A finite loss with an infinite derivative at an unmasked token shows there."""
    part, _ = part_of(lambda inputs: PolicyLossOutputs((inputs.logprobs - inputs.old_logprobs).abs().sqrt(), torch.zeros(5)))
    assert part.values["loss"].isfinite().all()
    assert not part.values["derivative of the loss"][MASK > 0].isfinite().any()
