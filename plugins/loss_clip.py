"""``clip``: PPO's clipped objective with separate lower and upper ranges."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rlbatch.api import PolicyLoss, PolicyLossInputs, PolicyLossOutputs, hookimpl

if TYPE_CHECKING:
    from torch import Tensor

MAX_LOG_RATIO = 20.0


def clip(inputs: PolicyLossInputs) -> PolicyLossOutputs:
    """``loss_t = max(-A r, -A clamp(r, 1 - eps_clip, 1 + eps_clip_high))`` with ``r = exp(logprob - old_logprob)``.

    Schulman et al. 2017 (arXiv 1707.06347, equation 7); ``eps_clip_high > eps_clip`` is DAPO's clip-higher (arXiv 2503.14476, section 3.1).
    There is no dual clip: a negative advantage is not bounded from above.
    """
    # exp() overflows float32 at 88: one such token would make the whole update NaN.
    log_ratio = (inputs.logprobs - inputs.old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio: Tensor = log_ratio.exp()
    unclipped = -inputs.advantages * ratio
    clipped = -inputs.advantages * ratio.clamp(1.0 - inputs.eps_clip, 1.0 + inputs.eps_clip_high)
    return PolicyLossOutputs(losses=unclipped.maximum(clipped), clipped=(clipped > unclipped).float())


@hookimpl
def rlbatch_register_policy_losses() -> Mapping[str, PolicyLoss]:
    """Names of this module."""
    return {"clip": clip}
