"""Around an advantage estimator: what it is given, and what its answer means for each token."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlbatch.api import AdvantageEstimator, AdvantageInputs, PluginError

if TYPE_CHECKING:
    from torch import Tensor


def advantage_inputs(
    rewards: Tensor, group_ids: Tensor, lengths: Tensor, kl: Tensor | None = None, kl_reward_coef: float = 0.0
) -> AdvantageInputs:
    """Inputs of an estimator; the KL penalty ``kl_reward_coef x kl`` is subtracted from the reward, token by token.

    Args:
        rewards: [N] float32, one a sample.
        group_ids: [N] int64, equal for samples of one prompt; groups are contiguous.
        lengths: [N] int64, response tokens of each sample, at least 1.
        kl: [T] float32 nats, one a response token, samples concatenated in order; None: no penalty.
        kl_reward_coef: ``algorithm.kl_reward_coef``.
    """
    last = lengths.cumsum(0) - 1
    penalties = rewards.new_zeros(int(lengths.sum())) if kl is None else -kl_reward_coef * kl.detach()
    so_far = penalties.double().cumsum(0)[last]
    penalty = so_far.diff(prepend=so_far.new_zeros(1)).to(rewards.dtype)
    return AdvantageInputs(
        rewards=rewards + penalty, group_ids=group_ids, lengths=lengths, token_rewards=penalties.index_add(0, last, rewards)
    )


def token_advantages(name: str, estimator: AdvantageEstimator, inputs: AdvantageInputs) -> Tensor:
    """The estimator's answer as one advantage a response token.

    Args:
        name: The estimator's name, for errors.
        estimator: Answers with [N] (given to each token of the sample) or [T].
        inputs: All samples of the step.

    Returns:
        [T] float32, samples concatenated in order.

    Raises:
        PluginError: another shape, or a value that is not finite.
    """
    advantages = estimator(inputs)
    samples, tokens = len(inputs.lengths), len(inputs.token_rewards)
    if tuple(advantages.shape) not in ((samples,), (tokens,)):
        raise PluginError(
            f"algorithm.advantage={name}: returned shape {list(advantages.shape)} for {samples} samples with {tokens} tokens. "
            f"Return [{samples}] or [{tokens}]."
        )
    broken = int((~advantages.isfinite()).sum())
    if broken:
        raise PluginError(f"algorithm.advantage={name}: {broken} of {advantages.numel()} advantages are not finite. Mend the estimator.")
    if len(advantages) == tokens:
        return advantages.float()
    return advantages.float().repeat_interleave(inputs.lengths)
