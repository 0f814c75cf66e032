"""``cispo``: REINFORCE with a bounded importance weight; no token loses its gradient."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rlbatch.api import LossSpec, PolicyLoss, PolicyLossInputs, PolicyLossOutputs, hookimpl
from rlbatch.api.values import option

MAX_LOG_RATIO = 20.0


@dataclass(frozen=True)
class CispoOptions:
    """``algorithm.loss_options.*`` of ``cispo``."""

    lower_bound: bool = option(True, "Whether weights are at least 1 - eps_clip (verl, slime); false: no lower bound (MiniMax-M1).")


def build_cispo(options: CispoOptions) -> PolicyLoss:
    """``loss_t = -sg[clamp(r, 1 - eps_clip, 1 + eps_clip_high)] A logprob_t`` with ``r = exp(logprob - old_logprob)``.

    MiniMax-M1 (arXiv 2506.13585, equations 4 and 5), which sets only the upper bound: ``lower_bound=false``. NeMo-RL's ranges of 1.0 and
    5.0 are ``lower_bound=false`` with ``algorithm.eps_clip_high=5``. Its value is no measure of progress. ``clipped`` is 1 where the weight
    is bounded: no token loses its gradient.
    """

    def cispo(inputs: PolicyLossInputs) -> PolicyLossOutputs:
        ratio = (inputs.logprobs - inputs.old_logprobs).detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        weight = ratio.clamp(1.0 - inputs.eps_clip if options.lower_bound else 0.0, 1.0 + inputs.eps_clip_high)
        return PolicyLossOutputs(losses=-weight * inputs.advantages * inputs.logprobs, clipped=(weight != ratio).float())

    return cispo


@hookimpl
def rlbatch_register_policy_losses() -> Mapping[str, LossSpec]:
    """Names of this module."""
    return {"cispo": LossSpec(build_cispo, CispoOptions)}
