"""``dppo``: tokens are dropped by the divergence of trainer and engine, not by their ratio."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from rlbatch.api import LossSpec, PolicyLoss, PolicyLossInputs, PolicyLossOutputs, hookimpl
from rlbatch.api.values import Range, option

if TYPE_CHECKING:
    from torch import Tensor

MAX_LOG_RATIO = 20.0
THRESHOLDS = {"tv": 0.15, "kl": 0.05}


@dataclass(frozen=True)
class DppoOptions:
    """``algorithm.loss_options.*`` of ``dppo``."""

    divergence: Literal["tv", "kl"] = option(
        "tv", "Of policy and engine at a token: difference of its probabilities, or KL of token against rest."
    )
    delta_low: Annotated[float, Range(above=0, most=1e6)] | None = option(
        None, "Threshold where the advantage is not positive; null: 0.15 (tv), 0.05 (kl)."
    )
    delta_high: Annotated[float, Range(above=0, most=1e6)] | None = option(
        None, "Threshold where the advantage is positive; null: 0.15 (tv), 0.05 (kl)."
    )
    ratio_cap: Annotated[float, Range(least=1, most=1e6)] = option(20.0, "Largest importance weight of a token.")

    def __post_init__(self) -> None:
        for name in ("delta_low", "delta_high"):
            delta = getattr(self, name)
            if self.divergence == "tv" and delta is not None and delta >= 1:
                raise ValueError(f"{name} ({delta:g}) must be below 1 with divergence tv, as probabilities never differ by more; e.g. 0.15")


def build_dppo(options: DppoOptions) -> PolicyLoss:
    """``loss_t = -keep A sg[min(p / q, ratio_cap)] logprob_t``; p the policy's probability of the token, q the engine's.

    DPPO (arXiv 2602.04879), as verl has it (`core_algos.py`; thresholds of its recipe). A token is dropped if the policy has moved
    too far from the engine, in the direction in which its advantage pushes it:

    - ``tv``: ``p - q > delta_high`` where A > 0; ``p - q < -delta_low`` elsewhere.
    - ``kl``: ``KL > delta_high`` and p > q where A > 0; ``KL > delta_low`` and p < q elsewhere, with
      ``KL = q log(q / p) + (1 - q) log((1 - q) / (1 - p))``.

    It compares with the engine's log-probs, so it corrects for the engine's arithmetic by itself. Its value is no measure of progress. verl
    adds 1e-8 in the KL, and its recipe caps at 3.
    """
    usual = THRESHOLDS[options.divergence]
    low = usual if options.delta_low is None else options.delta_low
    high = usual if options.delta_high is None else options.delta_high

    def dppo(inputs: PolicyLossInputs) -> PolicyLossOutputs:
        new, old = inputs.logprobs.detach().double(), inputs.rollout_logprobs.double()
        is_pushed_up = inputs.advantages > 0
        moved = new.exp() - old.exp()
        divergence = moved.abs() if options.divergence == "tv" else _binary_kl(new, old)
        dropped = ((moved > 0) & (divergence > high)).where(is_pushed_up, (moved < 0) & (divergence > low))
        weight = (new - old).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().clamp(max=options.ratio_cap)
        weight = weight.masked_fill(dropped, 0.0).to(inputs.logprobs.dtype)
        return PolicyLossOutputs(losses=-weight * inputs.advantages * inputs.logprobs, clipped=dropped.float())

    return dppo


def _binary_kl(new: Tensor, old: Tensor) -> Tensor:
    """KL(q || p) of the token against all others, [T] float64; infinite where only the policy leaves nothing to them."""
    from torch import special

    rest_new, rest_old = -new.clamp(max=0.0).expm1(), -old.clamp(max=0.0).expm1()
    divergence: Tensor = old.exp() * (old - new) + special.xlogy(rest_old, rest_old) - special.xlogy(rest_old, rest_new)
    return divergence


@hookimpl
def rlbatch_register_policy_losses() -> Mapping[str, LossSpec]:
    """Names of this module."""
    return {"dppo": LossSpec(build_dppo, DppoOptions)}
