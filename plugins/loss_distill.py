"""``distill``: on-policy distillation, with log-probs of the policy as it is now; the reference model is the teacher."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from rlbatch.api import LossSpec, PolicyLoss, PolicyLossInputs, PolicyLossOutputs, hookimpl
from rlbatch.api.values import Range, option

MAX_LOG_RATIO = 20.0


@dataclass(frozen=True)
class DistillOptions:
    """``algorithm.loss_options.*`` of ``distill``."""

    mask_low: Annotated[float, Range(above=0, most=1)] | None = option(
        None, "Tokens whose probability has fallen by more than this since they were sampled are dropped (prime-rl: 0.2); null: none."
    )
    regulariser: Annotated[float, Range(least=0, most=1e6)] = option(
        0.0, "Coefficient of the squared log-ratio, on dropped tokens too (prime-rl: 1e-3)."
    )


def build_distill(options: DistillOptions) -> PolicyLoss:
    """``loss_t = -keep sg[ref_logprob - logprob] r + regulariser (log r)^2`` with ``r = p / q``; q is the engine's probability.

    The signal at each token is what the teacher's log-prob is above the policy's, so its expected gradient is that of KL(policy, teacher)
    (Lu 2025, "On-policy distillation"; prime-rl's `ref_kl`, which masks at 0.2 and regularises with 1e-3). Advantages are not used. The
    estimator of the same name takes the difference to the old policy instead; both are equal in a step's first update.
    """

    def distill(inputs: PolicyLossInputs) -> PolicyLossOutputs:
        assert inputs.ref_logprobs is not None  # it needs_reference
        log_ratio = (inputs.logprobs - inputs.rollout_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        moved = inputs.logprobs.detach().double().exp() - inputs.rollout_logprobs.double().exp()
        dropped = moved < -(2.0 if options.mask_low is None else options.mask_low)
        signal = inputs.ref_logprobs - inputs.logprobs.detach()
        losses = (-signal * log_ratio.exp()).masked_fill(dropped, 0.0) + options.regulariser * log_ratio.square()
        return PolicyLossOutputs(losses=losses, clipped=dropped.float())

    return distill


@hookimpl
def rlbatch_register_policy_losses() -> Mapping[str, LossSpec]:
    """Names of this module."""
    return {"distill": LossSpec(build_distill, DistillOptions, needs_reference=True)}
