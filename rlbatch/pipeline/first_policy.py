"""The policy before a step's first update: computes its log-probs of the samples in few forward passes, and compares the engine's."""

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
    """The log-probs of a step's samples under the policy before the first update. Every method is a collective.

    Attributes:
        job: This rank's part of the job.
        updates: Updates of the first epoch. Their packs get old log-probs (those of the first update in ``known``) and the reference's.
        finder: Finder among the step's samples.
        broken: Message about the first sample with a log-prob that is not finite; empty while none is known.
        metrics: Differences between the engine and this policy, once they are known.
    """

    job: Job
    updates: Sequence[Update]
    finder: SampleFinder
    broken: str = ""
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def scored(self) -> Sequence[Update]:
        """Updates whose samples get old log-probs from a forward pass of their own.

        The first update computes its own, unless its old log-probs are needed before its loss, or its routes in later epochs.
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
        """Runs the forward passes that are needed before the first update."""
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
        """Receives the log-probs of the first update's forward pass, before the policy changes.

        Args:
            advantages: Advantages of every sample.
            logprobs: [T] for each pack of the first update, nats.

        Raises:
            NotFinite: log-probs are not finite, as ``broken`` describes.
            RolloutError: the engine's log-probs differ by more than ``rollout.max_logprob_diff``.
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
