"""``gspo`` and ``gspo_token``: PPO's clipped objective with one importance ratio for each response, or each of its tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rlbatch.api import LossSpec, PolicyLossInputs, PolicyLossOutputs, always, hookimpl

if TYPE_CHECKING:
    from torch import Tensor

MAX_LOG_RATIO = 20.0
MAX_TOKEN_LOG_RATIO = 10.0


def gspo(inputs: PolicyLossInputs) -> PolicyLossOutputs:
    """``loss = max(-A s, -A clamp(s, 1 - eps_clip, 1 + eps_clip_high))`` with ``s = exp(mean_t(logprob_t - old_logprob_t))``.

    Zheng et al. 2025 (arXiv 2507.18071, equation 5): the mean over the response's sampled tokens is the ratio of its length-normalised
    likelihoods, and the gradient goes through it. Every token has its response's ratio. The paper's ranges are 3e-4 and 4e-4.
    """
    log_ratio = inputs.sequences.mean(inputs.logprobs - inputs.old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return _clipped(inputs, log_ratio.exp())


def gspo_token(inputs: PolicyLossInputs) -> PolicyLossOutputs:
    """``loss_t = max(-A_t s_t, -A_t clamp(s_t, 1 - eps_clip, 1 + eps_clip_high))``, ``s_t = sg[s] exp(logprob_t - sg[logprob_t])``.

    ``s = exp(mean_t(logprob_t - old_logprob_t))`` is the response's ratio; ``sg`` stops the gradient; ``log s_t`` is at most 10. Zheng et
    al. 2025 (arXiv 2507.18071, equations 13 and 14). Where a response has one advantage it is ``gspo``, in value and gradient. verl calls
    this one `gspo`. The paper's ranges are 3e-4 and 4e-4, its aggregation the mean over responses.
    """
    mean = inputs.sequences.mean(inputs.logprobs - inputs.old_logprobs).detach()
    return _clipped(inputs, (mean + inputs.logprobs - inputs.logprobs.detach()).clamp(max=MAX_TOKEN_LOG_RATIO).exp())


def _clipped(inputs: PolicyLossInputs, ratio: Tensor) -> PolicyLossOutputs:
    unclipped = -inputs.advantages * ratio
    clipped = -inputs.advantages * ratio.clamp(1.0 - inputs.eps_clip, 1.0 + inputs.eps_clip_high)
    return PolicyLossOutputs(losses=unclipped.maximum(clipped), clipped=(clipped > unclipped).float())


@hookimpl
def rlbatch_register_policy_losses() -> Mapping[str, LossSpec]:
    """Names of this module."""
    losses = {"gspo": gspo, "gspo_token": gspo_token}
    return {name: LossSpec(always(loss), aggregations=("sequence_mean",)) for name, loss in losses.items()}
