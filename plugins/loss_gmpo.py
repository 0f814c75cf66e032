"""``gmpo``: the geometric mean of a response's clipped token ratios."""

from __future__ import annotations

from collections.abc import Mapping

from rlbatch.api import LossSpec, PolicyLossInputs, PolicyLossOutputs, always, hookimpl

MAX_LOG_RATIO = 20.0


def gmpo(inputs: PolicyLossInputs) -> PolicyLossOutputs:
    """``loss = -A exp(mean_t d'_t)`` with ``d' = sign(A) min(sign(A) d, sign(A) clamp(d, -eps_clip, eps_clip_high))``, ``d = log r``.

    Zhao et al. 2025 (arXiv 2507.20673, equation 4): each token's log-ratio is clipped in the direction of the advantage, then the
    response's ratio is their geometric mean. ``A`` is the mean of the response's advantages. The paper's ranges are 0.4 and 0.4, of the
    log-ratio. The mean over responses is that of the whole update; verl takes it over a microbatch.
    """
    log_ratio = (inputs.logprobs - inputs.old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    advantages = inputs.sequences.mean(inputs.advantages)
    sign = advantages.sign()
    bounded = log_ratio.clamp(-inputs.eps_clip, inputs.eps_clip_high)
    kept = sign * (sign * log_ratio).minimum(sign * bounded)
    losses = -advantages * inputs.sequences.mean(kept).exp()
    return PolicyLossOutputs(losses=losses, clipped=((kept != log_ratio) & (sign != 0)).float())


@hookimpl
def rlbatch_register_policy_losses() -> Mapping[str, LossSpec]:
    """Names of this module."""
    return {"gmpo": LossSpec(always(gmpo), aggregations=("sequence_mean",))}
