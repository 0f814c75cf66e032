"""``distill``: on-policy distillation; the reference model is the teacher and needs no reward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rlbatch.api import AdvantageInputs, AdvantageSpec, always, hookimpl

if TYPE_CHECKING:
    from torch import Tensor


def distill(inputs: AdvantageInputs) -> Tensor:
    """``A_t = ref_logprob_t - old_logprob_t`` (Lu 2025, "On-policy distillation"; as NeMo-RL has it).

    Its expected gradient is that of KL(policy, teacher). Rewards are measured, but do not enter. The policy loss of the same name takes the
    policy's log-probs as they are in each update instead of those before the first.

    Returns:
        [T] float64.
    """
    assert inputs.ref_logprobs is not None  # it needs_reference
    assert inputs.old_logprobs is not None
    return inputs.ref_logprobs - inputs.old_logprobs


@hookimpl
def rlbatch_register_advantage_estimators() -> Mapping[str, AdvantageSpec]:
    """Names of this module."""
    return {"distill": AdvantageSpec(always(distill), needs_reference=True)}
