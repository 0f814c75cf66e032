"""``reinforce``: importance-weighted REINFORCE against the engine's log-probs, with a mask and a regulariser of the log-ratio."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from rlbatch.api import LossSpec, PolicyLoss, PolicyLossInputs, PolicyLossOutputs, hookimpl
from rlbatch.api.values import Range, option

MAX_LOG_RATIO = 20.0


@dataclass(frozen=True)
class ReinforceOptions:
    """``algorithm.loss_options.*`` of ``reinforce``."""

    mask: Literal["one_sided", "two_sided", "none"] = option(
        "one_sided", "Tokens that are dropped: those too far in the direction of their advantage, too far in any, or none."
    )
    mask_low: Annotated[float, Range(above=0, most=1)] = option(
        0.2, "One-sided: most that a token's probability may have fallen where the advantage is not positive."
    )
    mask_high: Annotated[float, Range(above=0, most=1)] = option(
        0.2, "Most that it may have risen where the advantage is positive; two-sided: most that it may differ."
    )
    regulariser: Annotated[float, Range(least=0, most=1e6)] = option(1e-3, "Coefficient of the squared log-ratio, on dropped tokens too.")

    def __post_init__(self) -> None:
        unused = {"one_sided": (), "two_sided": ("mask_low",), "none": ("mask_low", "mask_high")}[self.mask]
        for name in unused:
            if getattr(self, name) != getattr(ReinforceOptions, name):
                raise ValueError(f"{name} ({getattr(self, name):g}) has no effect with mask {self.mask}")


def build_reinforce(options: ReinforceOptions) -> PolicyLoss:
    """``loss_t = -keep A r + regulariser (log r)^2`` with ``r = p / q``; p the policy's probability of the token, q the engine's.

    prime-rl's default loss (`trainer/rl/loss.py`; mask 0.2 and 0.2, regulariser 1e-3), the gradient through r. One-sided: a token is
    dropped where A > 0 and ``p - q > mask_high``, or A <= 0 and ``p - q < -mask_low``. Two-sided (its ``ipo``): where
    ``|p - q| > mask_high``. On policy it is plain REINFORCE. It compares with the engine's log-probs, so it corrects for the engine's
    arithmetic by itself.
    """

    def reinforce(inputs: PolicyLossInputs) -> PolicyLossOutputs:
        log_ratio = (inputs.logprobs - inputs.rollout_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        moved = inputs.logprobs.detach().double().exp() - inputs.rollout_logprobs.double().exp()
        dropped = moved.abs() > (options.mask_high if options.mask == "two_sided" else 2.0)
        if options.mask == "one_sided":
            dropped = (moved > options.mask_high).where(inputs.advantages > 0, moved < -options.mask_low)
        losses = (-inputs.advantages * log_ratio.exp()).masked_fill(dropped, 0.0) + options.regulariser * log_ratio.square()
        return PolicyLossOutputs(losses=losses, clipped=dropped.float())

    return reinforce


@hookimpl
def rlbatch_register_policy_losses() -> Mapping[str, LossSpec]:
    """Names of this module."""
    return {"reinforce": LossSpec(build_reinforce, ReinforceOptions)}
