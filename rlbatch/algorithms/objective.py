"""What an update minimises: policy loss + kl_loss_coef x KL - entropy_coef x entropy, every term with the same weights and denominator.

Only the policy loss is corrected for what engine and trainer disagree on (``rlbatch.algorithms.correction``). A microbatch without old
log-probs is of the step's first update: they are its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlbatch.algorithms.aggregate import loss_weights
from rlbatch.algorithms.correction import correct, is_on, with_denominator_of_kept
from rlbatch.algorithms.kl import kl_penalty
from rlbatch.api import Microbatch, PluginError, PolicyLoss, PolicyLossInputs, PolicyLossOutputs, Sequences, of_one_rank
from rlbatch.config.schema import AlgorithmConfig, CorrectionConfig
from rlbatch.foreign_code import foreign_code

SUMS = ("loss", "policy_loss", "ppo_kl", "kl", "entropy", "clip_fraction")
"""What ``LossPart.sums`` holds, in this order; all but the first two are sums over unmasked tokens."""


class LossPart(NamedTuple):
    """A microbatch's part of an update's loss.

    Attributes:
        loss: Scalar to add up over microbatches and ranks.
        sums: [len(SUMS)] float64 without gradient, for the metrics.
        values: What it was made of, [T] each and 0 where masked, in the order in which one follows from the others.
    """

    loss: Tensor
    sums: Tensor
    values: Mapping[str, Tensor]


@dataclass(frozen=True)
class Objective:
    """The loss of a microbatch.

    Attributes:
        algorithm: Coefficients and aggregation.
        policy_loss: The plugin.
        correction: What the policy loss is multiplied with.
        kept_ratio: The update's denominator before rejection over that after it; for ``correction.denominator=kept`` alone.
    """

    algorithm: AlgorithmConfig
    policy_loss: PolicyLoss
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    kept_ratio: float = 1.0

    def __call__(
        self,
        logprobs: Tensor,
        entropy: Tensor,
        microbatch: Microbatch,
        denominator: float,
        over_ranks: Callable[[Tensor], Tensor] = of_one_rank,
    ) -> LossPart:
        """This microbatch's part of the update's loss.

        Nothing at a masked position gets into it, or into its gradient, also not NaN: those positions are replaced, not multiplied with 0.

        Args:
            logprobs: [T] float32 nats, carries the gradient; T may be a context-parallel rank's part.
            entropy: [T] float32 nats, carries the gradient.
            microbatch: The same tokens; has old log-probs unless they are ``logprobs``, and reference log-probs if the KL is measured.
            denominator: The denominator of the whole update, all ranks together.
            over_ranks: See ``Sequences``.

        Raises:
            PluginError: what the policy loss returned is no loss of these tokens.
        """
        keep = microbatch.loss_mask > 0
        aggregation = self.algorithm.loss_aggregation
        weights = loss_weights(microbatch.loss_mask, microbatch.sequence_ids, microbatch.sampled_tokens, aggregation) / denominator
        logprobs, entropy = logprobs.where(keep, 0.0), entropy.where(keep, 0.0)
        old = logprobs.detach() if microbatch.old_logprobs is None else microbatch.old_logprobs
        # The plugin has a graph of its own: a backward pass that it makes must not reach the model.
        own = logprobs.detach().requires_grad_(logprobs.requires_grad)
        losses, clipped = self._policy(own, old, microbatch, over_ranks)
        losses, clipped = losses.where(keep, 0.0).float(), clipped.where(keep, 0).float()
        policy_loss = (self._corrected(losses, replace(microbatch, old_logprobs=old), over_ranks) * weights).sum()
        derivatives = self._derivatives(policy_loss, own).where(keep, 0.0)
        total = -self.algorithm.entropy_coef * entropy
        kl = torch.zeros_like(entropy)
        if microbatch.ref_logprobs is not None:
            kl = kl_penalty(self.algorithm.kl_kind, logprobs, microbatch.ref_logprobs).where(keep, 0.0)
            if self.algorithm.kl_loss:
                total = total + self.algorithm.kl_loss_coef * kl
        # Value and gradient of the policy loss, without its graph.
        loss = policy_loss.detach() + ((logprobs - logprobs.detach()) * derivatives).sum() + (total * weights).sum()
        per_token = [values.where(keep, 0.0).sum(dtype=torch.float64) for values in (old - logprobs, kl, entropy, clipped)]
        values = {
            "log-prob": logprobs,
            "entropy": entropy,
            "old log-prob": old,
            "advantage": microbatch.advantages,
            "KL": kl,
            "loss": losses,
            "derivative of the loss": derivatives,
            "clipped": clipped,
        }
        return LossPart(
            loss,
            torch.stack([value.detach().double() for value in (loss, policy_loss, *per_token)]),
            {name: value.detach() for name, value in values.items()},
        )

    def _policy(
        self, logprobs: Tensor, old: Tensor, microbatch: Microbatch, over_ranks: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """The plugin's losses, checked. It gets copies of its inputs, which it may write into."""
        given = PolicyLossInputs(
            logprobs=logprobs.clone(),
            old_logprobs=old.clone(),
            rollout_logprobs=microbatch.rollout_logprobs.clone(),
            advantages=microbatch.advantages.clone(),
            eps_clip=self.algorithm.eps_clip,
            eps_clip_high=self.algorithm.eps_clip_high,
            sequences=Sequences(
                microbatch.sequence_ids.clone(),
                microbatch.loss_mask > 0,
                microbatch.sampled_tokens.clone(),
                microbatch.truncated.clone(),
                over_ranks,
            ),
            ref_logprobs=None if microbatch.ref_logprobs is None else microbatch.ref_logprobs.where(microbatch.loss_mask > 0, 0.0),
            lags=torch.zeros_like(logprobs, dtype=torch.int64) if microbatch.lags is None else microbatch.lags.clone(),
        )
        with foreign_code(f"algorithm.loss={self.algorithm.loss}", on=f"a pack of {len(logprobs)} tokens"):
            answer: Any = self.policy_loss(given)
        if not isinstance(answer, PolicyLossOutputs):
            raise self._error(f"returned {type(answer).__name__}", "Return PolicyLossOutputs(losses, clipped).")
        shape, device = list(logprobs.shape), logprobs.device
        for name, real in (("losses", (torch.float32, torch.float64)), ("clipped", None)):
            values: Any = getattr(answer, name)
            if not isinstance(values, Tensor):
                raise self._error(f"{name} is {type(values).__name__}", f"Return a tensor {shape}.")
            if list(values.shape) != shape or values.device != device or values.layout != torch.strided:
                raise self._error(
                    f"{name} has shape {list(values.shape)} on {values.device}{'' if values.layout == torch.strided else ', sparse'}",
                    f"Return {shape} on {device}: one value a token, not aggregated.",
                )
            if values.is_complex() or (real and values.dtype not in real):
                raise self._error(f"{name} is of {values.dtype}", "Return torch.float32.")
        return answer.losses, answer.clipped.detach()

    def _corrected(self, losses: Tensor, microbatch: Microbatch, over_ranks: Callable[[Tensor], Tensor]) -> Tensor:
        """Losses times the correction's weights. A loss with weight 0 is replaced by 0, as 0 times an infinite loss would be NaN."""
        if not is_on(self.correction):
            return losses
        factors, kept = correct(microbatch, self.correction, over_ranks)
        if self.correction.denominator == "kept":
            aggregation, ratio = self.algorithm.loss_aggregation, self.kept_ratio
            factors = with_denominator_of_kept(factors, kept, microbatch, aggregation, ratio, over_ranks)
        factors = factors.float()
        return losses.where(factors > 0, 0.0) * factors

    def _derivatives(self, policy_loss: Tensor, logprobs: Tensor) -> Tensor:
        """Derivatives of the policy loss by the log-probs, [T]; refuses a loss without any: the policy would be left to the other terms."""
        if not logprobs.requires_grad:
            return torch.zeros_like(logprobs)
        derivatives = torch.autograd.grad(policy_loss, logprobs, allow_unused=True)[0] if policy_loss.requires_grad else None
        if derivatives is None:
            raise self._error("losses carry no gradient", "Compute them from inputs.logprobs, without detach, no_grad or NumPy.")
        return derivatives

    def _error(self, found: str, fix: str) -> PluginError:
        return PluginError(f"algorithm.loss={self.algorithm.loss}: {found}. {fix}")
