"""What an update minimises: policy loss + kl_loss_coef x KL - entropy_coef x entropy, every term with the same weights and denominator."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlbatch.algorithms.aggregate import loss_weights
from rlbatch.algorithms.kl import kl_penalty
from rlbatch.api import Microbatch, PolicyLoss, PolicyLossInputs
from rlbatch.config.schema import AlgorithmConfig

SUMS = ("loss", "policy_loss", "ppo_kl", "kl", "entropy", "clip_fraction")
"""What ``Objective`` returns beside the loss, in this order; all but the first two are sums over unmasked tokens."""


@dataclass(frozen=True)
class Objective:
    """The loss of a microbatch.

    Attributes:
        algorithm: Coefficients and aggregation.
        policy_loss: The plugin.
    """

    algorithm: AlgorithmConfig
    policy_loss: PolicyLoss

    def __call__(self, logprobs: Tensor, entropy: Tensor, microbatch: Microbatch, denominator: float) -> tuple[Tensor, Tensor]:
        """This microbatch's part of the update's loss, and sums for the metrics.

        Args:
            logprobs: [T] float32 nats, carries the gradient; T may be a context-parallel rank's part.
            entropy: [T] float32 nats, carries the gradient.
            microbatch: The same tokens; has old log-probs, and reference log-probs if the KL is measured.
            denominator: Of the whole update, all ranks together.

        Returns:
            Scalar to add up over microbatches and ranks, and [len(SUMS)] float64 without gradient.
        """
        mask = microbatch.loss_mask
        keep = mask > 0
        logprobs, entropy = logprobs.where(keep, 0.0), entropy.where(keep, 0.0)
        old = logprobs.detach() if microbatch.old_logprobs is None else microbatch.old_logprobs
        policy = self.policy_loss(
            PolicyLossInputs(
                logprobs=logprobs,
                old_logprobs=old,
                rollout_logprobs=microbatch.rollout_logprobs,
                advantages=microbatch.advantages,
                eps_clip=self.algorithm.eps_clip,
                eps_clip_high=self.algorithm.eps_clip_high,
            )
        )
        total = policy.losses - self.algorithm.entropy_coef * entropy
        kl = logprobs.new_zeros(())
        if microbatch.ref_logprobs is not None:
            kl = kl_penalty(self.algorithm.kl_kind, logprobs, microbatch.ref_logprobs)
            if self.algorithm.kl_loss:
                total = total + self.algorithm.kl_loss_coef * kl
        weights = loss_weights(mask, microbatch.sequence_weights, self.algorithm.loss_aggregation) / denominator
        loss = (total * weights).sum()
        per_token = (old - logprobs, kl, entropy, policy.clipped)
        sums = [loss, (policy.losses * weights).sum(), *((value * mask).sum() for value in per_token)]
        return loss, torch.stack([value.detach().double() for value in sums])
