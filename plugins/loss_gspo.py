"""``gspo``: PPO's clipped objective with one importance ratio for each response."""

from __future__ import annotations

from collections.abc import Mapping

from rlbatch.api import LossSpec, PolicyLossInputs, PolicyLossOutputs, always, hookimpl

MAX_LOG_RATIO = 20.0


def gspo(inputs: PolicyLossInputs) -> PolicyLossOutputs:
    """``loss = max(-A s, -A clamp(s, 1 - eps_clip, 1 + eps_clip_high))`` with ``s = exp(mean_t(logprob_t - old_logprob_t))``.

    Zheng et al. 2025 (arXiv 2507.18071, equation 5): the mean over the response's sampled tokens is the ratio of its length-normalised
    likelihoods, and the gradient goes through it. Every token has its response's ratio. The paper's ranges are 3e-4 and 4e-4.
    """
    log_ratio = inputs.sequences.mean(inputs.logprobs - inputs.old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    unclipped = -inputs.advantages * ratio
    clipped = -inputs.advantages * ratio.clamp(1.0 - inputs.eps_clip, 1.0 + inputs.eps_clip_high)
    return PolicyLossOutputs(losses=unclipped.maximum(clipped), clipped=(clipped > unclipped).float())


@hookimpl
def rlbatch_register_policy_losses() -> Mapping[str, LossSpec]:
    """Names of this module."""
    return {"gspo": LossSpec(always(gspo), aggregations=("sequence_mean",))}
