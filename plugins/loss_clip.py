"""``clip``: PPO's clipped objective with separate lower and upper ranges, and an optional bound where the advantage is negative."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from rlbatch.api import LossSpec, PolicyLoss, PolicyLossInputs, PolicyLossOutputs, hookimpl
from rlbatch.api.values import Range, option

if TYPE_CHECKING:
    from torch import Tensor

MAX_LOG_RATIO = 20.0


@dataclass(frozen=True)
class ClipOptions:
    """``algorithm.loss_options.*`` of ``clip``."""

    dual_clip: Annotated[float, Range(above=1, most=1e15)] | None = option(
        None,
        "Where the advantage is negative: the loss is at most this times its size (verl: 3.0); null: it is not bounded.",
    )


def build_clip(options: ClipOptions) -> PolicyLoss:
    """``loss_t = max(-A r, -A clamp(r, 1 - eps_clip, 1 + eps_clip_high))`` with ``r = exp(logprob - old_logprob)``.

    Schulman et al. 2017 (arXiv 1707.06347, equation 7); ``eps_clip_high > eps_clip`` is DAPO's clip-higher (arXiv 2503.14476, section 3.1).
    With ``dual_clip`` = c, where A < 0: ``min(loss_t, -c A)`` (Ye et al. 2020, arXiv 1912.09729, equation 5). Default: no dual clip.
    """

    def clip(inputs: PolicyLossInputs) -> PolicyLossOutputs:
        # exp() overflows float32 at 88: one such token would make the whole update NaN.
        log_ratio = (inputs.logprobs - inputs.old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        ratio: Tensor = log_ratio.exp()
        unclipped = -inputs.advantages * ratio
        clipped = -inputs.advantages * ratio.clamp(1.0 - inputs.eps_clip, 1.0 + inputs.eps_clip_high)
        losses, is_clipped = unclipped.maximum(clipped), clipped > unclipped
        if options.dual_clip is not None:
            bound = -options.dual_clip * inputs.advantages
            is_bounded = (inputs.advantages < 0) & (losses > bound)
            losses, is_clipped = losses.where(~is_bounded, bound), is_clipped | is_bounded
        return PolicyLossOutputs(losses=losses, clipped=is_clipped.float())

    return clip


@hookimpl
def rlbatch_register_policy_losses() -> Mapping[str, LossSpec]:
    """Names of this module."""
    return {"clip": LossSpec(build_clip, ClipOptions)}
