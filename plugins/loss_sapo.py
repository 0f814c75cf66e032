"""``sapo``: a smooth gate in the place of the clip."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from rlbatch.api import LossSpec, PolicyLoss, PolicyLossInputs, PolicyLossOutputs, hookimpl
from rlbatch.api.values import Range, option

MAX_LOG_RATIO = 20.0


@dataclass(frozen=True)
class SapoOptions:
    """``algorithm.loss_options.*`` of ``sapo``."""

    tau_pos: Annotated[float, Range(least=1e-3, most=1e3)] = option(1.0, "Temperature of the gate where the advantage is positive.")
    tau_neg: Annotated[float, Range(least=1e-3, most=1e3)] = option(
        1.05, "Temperature of the gate elsewhere; larger: the gradient fades faster away from ratio 1."
    )


def build_sapo(options: SapoOptions) -> PolicyLoss:
    """``loss_t = -A (4 / tau) sigmoid(tau (r - 1))`` with ``r = exp(logprob - old_logprob)``, tau by the sign of A.

    Gao et al. 2025 (arXiv 2511.20347, equations 5 and 6; tau 1.0 and 1.05). At ratio 1 its gradient is ``-A``, as of every other loss. It
    clips nothing. verl always takes ``sequence_mean`` with it.
    """

    def sapo(inputs: PolicyLossInputs) -> PolicyLossOutputs:
        ratio = (inputs.logprobs - inputs.old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        tau = ratio.new_full(ratio.shape, options.tau_neg).where(inputs.advantages <= 0, options.tau_pos)
        gate = 4.0 / tau * (tau * (ratio - 1.0)).sigmoid()
        return PolicyLossOutputs(losses=-gate * inputs.advantages, clipped=ratio.new_zeros(ratio.shape))

    return sapo


@hookimpl
def rlbatch_register_policy_losses() -> Mapping[str, LossSpec]:
    """Names of this module."""
    return {"sapo": LossSpec(build_sapo, SapoOptions)}
