"""Prepares what an advantage estimator is given, and turns its answer into one advantage a token.

Few estimators look at tokens: nothing here has the size of all of a step's before one does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from rlbatch.api import AdvantageEstimator, AdvantageInputs, ModelError, PluginError
from rlbatch.foreign_code import foreign_code

FLOAT32_MAX = torch.finfo(torch.float32).max


class _Inputs(AdvantageInputs):
    """Inputs whose ``token_rewards`` are given as a function, which is called when they are first read."""

    _made: Tensor | Callable[[], Tensor]

    @property
    def token_rewards(self) -> Tensor:
        if not isinstance(self._made, Tensor):
            object.__setattr__(self, "_made", self._made())
        assert isinstance(self._made, Tensor)
        return self._made

    @token_rewards.setter
    def token_rewards(self, value: Tensor | Callable[[], Tensor]) -> None:
        object.__setattr__(self, "_made", value)


@dataclass(frozen=True)
class Advantages:
    """One advantage for each response token, held as the estimator gave them.

    Attributes:
        values: [N] float32, one a sample, or [T] float32, samples concatenated.
        lengths: [N] int64, response tokens.
        samples: N indices in the batch, ascending; other samples have no token that counts.
    """

    values: Tensor
    lengths: Tensor
    samples: Sequence[int]

    def __getitem__(self, index: int) -> Tensor:
        """The advantages of one sample's R response tokens, [R] float32, by the sample's index in the batch."""
        place = self._places.get(index)
        if place is None:
            return self.values[:0]
        start, end = self._bounds[place : place + 2]
        return self.values[place].repeat(end - start) if self._are_of_samples else self.values[start:end]

    def tokens(self) -> Tensor:
        """The advantages of all response tokens, [T] float32, samples concatenated in order."""
        return self.values.repeat_interleave(self.lengths) if self._are_of_samples else self.values

    def means(self) -> tuple[float, float]:
        """Means over all response tokens of the advantages, and of their absolute values; 0 without tokens."""
        values, weights = self.values.double(), self.lengths.double() if self._are_of_samples else torch.ones(())
        tokens = max(int(self.lengths.sum()), 1)
        return float((values * weights).sum() / tokens), float((values.abs() * weights).sum() / tokens)

    @cached_property
    def _places(self) -> dict[int, int]:
        return {index: place for place, index in enumerate(self.samples)}

    @cached_property
    def _bounds(self) -> list[int]:
        return [0, *accumulate(self.lengths.tolist())]

    @property
    def _are_of_samples(self) -> bool:
        return len(self.values) == len(self.lengths)


def advantage_inputs(
    rewards: Tensor,
    group_ids: Tensor,
    lengths: Tensor,
    kl: Tensor | None = None,
    kl_reward_coef: float = 0.0,
    *,
    truncated: Tensor | None = None,
    old_logprobs: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    lags: Tensor | None = None,
) -> AdvantageInputs:
    """Inputs of an estimator, which may write into them. The KL penalty ``kl_reward_coef x kl`` is subtracted from the reward, by token.

    Args:
        rewards: [N] float64, one a sample.
        group_ids: [N] int64, equal for samples of one prompt; groups are contiguous.
        lengths: [N] int64, response tokens of each sample, at least 1.
        kl: [T] float32 nats, one a response token, samples concatenated in order; None: no penalty.
        kl_reward_coef: ``algorithm.kl_reward_coef``.
        truncated: [N] bool, cut at the length limit; None: none was.
        old_logprobs: [T] float64 nats; None: not needed.
        ref_logprobs: The same as ``old_logprobs``, of the reference model.
        lags: [N] int64, see ``AdvantageInputs``; None: 0.
    """
    penalties = None if kl is None else -kl_reward_coef * kl.detach().to(rewards.dtype)

    def token_rewards() -> Tensor:
        before = rewards.new_zeros(int(lengths.sum())) if penalties is None else penalties
        return before.index_add(0, lengths.cumsum(0) - 1, rewards)

    sample = None if penalties is None else torch.arange(len(lengths)).repeat_interleave(lengths)
    return _Inputs(
        rewards=rewards + 0.0 if penalties is None or sample is None else rewards.index_add(0, sample, penalties),
        group_ids=group_ids.clone(),
        lengths=lengths.clone(),
        token_rewards=token_rewards,  # type: ignore[arg-type]
        truncated=torch.zeros(len(lengths), dtype=torch.bool) if truncated is None else truncated.clone(),
        old_logprobs=old_logprobs,
        ref_logprobs=ref_logprobs,
        lags=torch.zeros_like(lengths) if lags is None else lags.clone(),
    )


def token_advantages(
    name: str, estimator: AdvantageEstimator, inputs: AdvantageInputs, sample_name: Callable[[int], str] = "sample {}".format
) -> Advantages:
    """The estimator's answer as advantages of response tokens.

    Args:
        name: The estimator's name, for errors.
        estimator: Answers with [N] (of each token of the sample) or [T].
        inputs: All samples of the step.
        sample_name: What a sample is called in errors, by its index.

    Raises:
        PluginError: no tensor, another shape, or a value that is not finite, or not in float32.
        ModelError: the KL to the reference is not finite.
    """
    rewards, lengths = inputs.rewards.clone(), inputs.lengths.clone()
    if not rewards.isfinite().all():
        first = int((~rewards.isfinite()).nonzero()[0])
        raise ModelError(
            f"algorithm.kl_reward_coef: the reward of {sample_name(first)} less its KL must be finite, is {float(rewards[first])}. "
            "The policy is too far from its reference: lower optimizer.lr, or use algorithm.kl_kind=k1."
        )
    with foreign_code(f"algorithm.advantage={name}", on=f"{len(lengths)} samples"):
        answer = estimator(inputs)
    samples, tokens = len(lengths), int(lengths.sum())
    asked = f"Return a real tensor [{samples}] or [{tokens}]."
    if not isinstance(answer, Tensor) or answer.is_complex() or answer.layout != torch.strided or answer.is_meta:
        kind = f"a tensor of {answer.dtype} ({answer.layout}, {answer.device})" if isinstance(answer, Tensor) else type(answer).__name__
        raise PluginError(f"algorithm.advantage={name}: returned {kind} for {samples} samples with {tokens} tokens. {asked}")
    if tuple(answer.shape) not in ((samples,), (tokens,)):
        raise PluginError(
            f"algorithm.advantage={name}: returned shape {list(answer.shape)} for {samples} samples with {tokens} tokens. {asked}"
        )
    answer = answer.detach().to(rewards.device)
    advantages = answer.float()
    broken = (~advantages.isfinite()).nonzero().flatten().tolist()
    if broken:
        first = broken[0] if len(answer) == samples else int((lengths.cumsum(0) <= broken[0]).sum())
        spread = f"rewards go from {float(rewards.min()):.6g} to {float(rewards.max()):.6g}"
        told = f"{float(answer[broken[0]]):.6g} for {sample_name(first)}, whose reward is {float(rewards[first]):.6g}; {spread}"
        if answer[broken].isfinite().all():
            raise PluginError(
                f"algorithm.advantage={name}: {len(broken)} of {len(answer)} advantages are beyond float32 ({FLOAT32_MAX:.3g}), "
                f"the first is {told}. Scale the rewards."
            )
        raise PluginError(
            f"algorithm.advantage={name}: {len(broken)} of {len(answer)} advantages are not finite, the first is {told}. "
            "Fix the estimator: all rewards are finite."
        )
    return Advantages(advantages, lengths, range(samples))
