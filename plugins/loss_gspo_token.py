"""``gspo_token``: GSPO's ratio of whole responses, with an advantage and a clip decision for each token."""

from __future__ import annotations

from collections.abc import Mapping

from rlbatch.api import LossSpec, PolicyLossInputs, PolicyLossOutputs, always, hookimpl

MAX_LOG_RATIO = 10.0


def gspo_token(inputs: PolicyLossInputs) -> PolicyLossOutputs:
    """``loss_t = max(-A_t s_t, -A_t clamp(s_t, 1 - eps_clip, 1 + eps_clip_high))``, ``s_t = sg[s] exp(logprob_t - sg[logprob_t])``.

    ``s = exp(mean_t(logprob_t - old_logprob_t))`` is the response's ratio; ``sg`` stops the gradient; ``log s_t`` is at most 10. Zheng et
    al. 2025 (arXiv 2507.18071, equations 13 and 14). Where a response has one advantage it is ``gspo``, in value and gradient. verl calls
    this one `gspo`. The paper's ranges are 3e-4 and 4e-4, its aggregation the mean over responses.
    """
    mean = inputs.sequences.mean(inputs.logprobs - inputs.old_logprobs).detach()
    ratio = (mean + inputs.logprobs - inputs.logprobs.detach()).clamp(max=MAX_LOG_RATIO).exp()
    unclipped = -inputs.advantages * ratio
    clipped = -inputs.advantages * ratio.clamp(1.0 - inputs.eps_clip, 1.0 + inputs.eps_clip_high)
    return PolicyLossOutputs(losses=unclipped.maximum(clipped), clipped=(clipped > unclipped).float())


@hookimpl
def rlbatch_register_policy_losses() -> Mapping[str, LossSpec]:
    """Names of this module."""
    return {"gspo_token": LossSpec(always(gspo_token), aggregations=("sequence_mean",))}
