"""Estimates the KL divergence from the policy to the reference model, one value a token."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlbatch.api import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

KL_KINDS = ("k1", "abs", "k2", "k3", "low_var_kl")

MAX_LOG_RATIO = 20.0
MAX_LOW_VARIANCE_KL = 10.0


def kl_penalty(kind: str, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """KL(policy || reference) at each token that the policy sampled (Schulman 2020, "Approximating KL divergence").

    With ``d = logprob - ref_logprob``:

    - ``k1``: ``d``. Unbiased, of any sign. As a loss its gradient is zero in expectation: use it in the reward, or to measure.
    - ``abs``: ``|d|``. Biased; its gradient has the same size wherever the two differ.
    - ``k2``: ``d^2 / 2``. As a loss its expected gradient is the gradient of the KL.
    - ``k3`` and ``low_var_kl``: ``exp(-d) - 1 + d``. Unbiased and not negative; ``d`` is clamped to +-20, the result to +-10 (verl).
      Where a clamp is active the gradient is 0.

    Args:
        kind: One of ``KL_KINDS``.
        logprobs: [T] float32 nats; may carry the gradient.
        ref_logprobs: [T] float32 nats; taken as constant.

    Returns:
        [T] float32 nats; 0 where both log-probs are equal.

    Raises:
        ConfigError: an unknown kind.
    """
    difference = logprobs - ref_logprobs.detach()
    if kind == "k1":
        return difference
    if kind == "abs":
        return difference.abs()
    if kind == "k2":
        return 0.5 * difference.square()
    if kind in ("k3", "low_var_kl"):
        log_ratio = (-difference).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        # expm1, because exp(x) - 1 loses the small values that matter near the reference.
        return (log_ratio.expm1() - log_ratio).clamp(-MAX_LOW_VARIANCE_KL, MAX_LOW_VARIANCE_KL)
    raise ConfigError(f"algorithm.kl_kind={kind}: no such estimator. Use {', '.join(KL_KINDS)}.")
