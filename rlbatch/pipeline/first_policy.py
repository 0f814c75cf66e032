"""The policy before a step's first update: its log-probs of the samples, in as few forward passes as there must be, beside the engine's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from rlbatch.algorithms.advantages import Advantages
from rlbatch.api import Microbatch
from rlbatch.config.old_logprobs import scores_first_update
from rlbatch.megatron.finite import NotFinite
from rlbatch.pipeline import step_metrics
from rlbatch.pipeline.correction_totals import measured
from rlbatch.pipeline.job import Job
from rlbatch.pipeline.mismatch import profile
from rlbatch.pipeline.sample_finder import SampleFinder
from rlbatch.pipeline.updates import Update


@dataclass
class FirstPolicy:
    """What is known of a step's samples by the policy before the first update. Every method is a collective.

    Attributes:
        job: This rank's part of the job.
        updates: Of the first epoch. Their packs get old log-probs, those of the first update with ``known``, and the reference's.
        finder: Of the step's samples.
        broken: The first sample with a log-prob that is not finite, in words; empty: none is known.
        metrics: How far the engine is from this policy; there once that is known.
    """

    job: Job
    updates: Sequence[Update]
    finder: SampleFinder
    broken: str = ""
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def scored(self) -> Sequence[Update]:
        """Those whose samples have a forward pass for their old log-probs. The first one computes its own, unless something asks for them
        before its loss, or for its routes in later epochs.
        """
        config = self.job.config
        if self._is_engines:
            return ()
        return self.updates if self.job.needs_logprobs or scores_first_update(config) else self.updates[1:]

    @property
    def _records(self) -> bool:
        return self.job.config.algorithm.routing_replay == "recorded"

    @property
    def _is_engines(self) -> bool:
        return self.job.config.algorithm.old_logprobs == "rollout"

    def score(self) -> None:
        """Runs the forward passes that come before the first update."""
        trainer, every, scored = self.job.trainer, _microbatches(self.updates), _microbatches(self.scored)
        if self._is_engines:
            for microbatch in every:
                microbatch.old_logprobs = microbatch.rollout_logprobs
        if scored:
            score = trainer.record if self._records else trainer.logprobs
            for microbatch, values in zip(scored, score(scored), strict=True):
                microbatch.old_logprobs = values
        if self.job.needs_reference:
            with trainer.reference():
                for microbatch, values in zip(every, trainer.logprobs(every), strict=True):
                    microbatch.ref_logprobs = values
        self.broken = self.finder.broken_logprobs(self.updates)
        if not self.broken:
            self.job.limit.measure(trainer, self.job.config, _microbatches(self.updates[:1]), quantises=self.job.quantises)

    def known(self, advantages: Advantages, logprobs: Sequence[Tensor]) -> None:
        """Takes what the forward pass of the first update gave, before that changes the policy.

        Args:
            advantages: Of each sample.
            logprobs: [T] for each pack of the first update.

        Raises:
            NotFinite: they are not, as ``broken`` says.
            RolloutError: the engine's are further away than ``rollout.max_logprob_diff`` allows.
        """
        config, updates = self.job.config, self.updates
        for microbatch, values in zip(_microbatches(updates[:1]), logprobs, strict=True):
            if microbatch.old_logprobs is None:
                microbatch.old_logprobs = values
        compared = [updates[0].with_values("old_logprobs", logprobs)] if self._is_engines else updates
        self.broken = self.finder.broken_logprobs(compared[:1])
        if self.broken:
            raise NotFinite(self.broken, None)
        microbatches = _microbatches([update.with_advantages(advantages) for update in compared])
        self.metrics = step_metrics.rollout_mismatch(microbatches)
        self.metrics |= profile(microbatches, self.job.rollout.digit_tokens(self.job.family.vocab_size))
        if config.algorithm.routing_replay == "rollout":
            shares = self.job.trainer.first_other_experts()
            self.metrics |= {f"mismatch/first_other_experts_{layer}": share for layer, share in shares.items()}
        if not self._is_engines:
            self.metrics |= measured(microbatches, config.correction)
        self.metrics |= step_metrics.check_logprob_difference(config, self.job.limit, self.metrics)


def _microbatches(updates: Sequence[Update]) -> list[Microbatch]:
    return [pack.microbatch for update in updates for pack in update.packs]
