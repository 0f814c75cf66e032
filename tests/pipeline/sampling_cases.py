"""Steps that filter groups, on the ranks of a pool: what the tests of sampling run, and what they get back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from rlbatch.api import RlbatchError, SampleGroup
from rlbatch.collectives import all_gather_bytes
from rlbatch.config.schema import Config
from rlbatch.pipeline.exchange import lags_of
from rlbatch.pipeline.step import train_step
from rlbatch.pipeline.waiting_groups import spans_of, unpack_candidates
from tests.pipeline.steps import Steps, job_of, run_steps


def even(group: SampleGroup) -> bool:
    """Keeps about half of the groups, by their tokens."""
    return int(group.samples[0].token_ids.sum()) % 2 == 0


def everything(group: SampleGroup) -> bool:
    return True


def nothing(group: SampleGroup) -> bool:
    return False


def filtered(config: Config, run_dir: str, keeps: Any, count: int) -> tuple[Steps, list[str], int]:
    """Steps with one filter of its own; what was told, and the policy's version at the end."""
    job, told = job_of(config, run_dir), []
    job.health.announce = told.append
    return run_steps(replace(job, filters={"own": keeps}), count), told, job.trainer.policy_version


def message(config: Config, run_dir: str, keeps: Any) -> str:
    """With which a step ends the run."""
    try:
        filtered(config, run_dir, keeps, 1)
    except RlbatchError as error:
        return str(error)
    return ""


def numbers_of(steps: Sequence[Steps], tag: str) -> list[list[float]]:
    """A metric of each rank's steps."""
    return [[metrics.get(f"sampling/{tag}", -1.0) for metrics in rank.metrics] for rank in steps]


@dataclass
class Followed:
    """What became of responses that were continued, on this rank.

    Attributes:
        problems: What does not hold, in words.
        continued: Responses with more than one span that were trained on.
        most_lag: Of a token that was trained on.
        worst_new, worst_old: Largest difference of engine's and trainer's log-probs at tokens of the step's policy, and of earlier ones.
    """

    problems: list[str] = field(default_factory=list)
    continued: int = 0
    most_lag: int = 0
    worst_new: float = 0.0
    worst_old: float = 0.0


def followed(config: Config, run_dir: str, count: int) -> Followed:
    """Runs steps and follows responses from each to the next."""
    job, seen = job_of(config, run_dir), Followed()
    trainer_update, kept = job.trainer.update, {}

    def update(microbatches: Any, objective: Any, denominator: float, known: Any = None) -> dict[str, float]:
        def told(own: list[torch.Tensor]) -> None:
            for m, now in zip(microbatches, own, strict=True):
                difference = ((now if m.old_logprobs is None else m.old_logprobs) - m.rollout_logprobs).abs()
                for name, chosen in (("worst_new", m.lags == 0), ("worst_old", m.lags > 0)):
                    worst = float(difference.where(chosen & (m.loss_mask > 0), 0.0).max())
                    setattr(seen, name, max(getattr(seen, name), worst))
                seen.most_lag = max(seen.most_lag, int(m.lags.max()))
            if known is not None:
                known(own)

        return trainer_update(microbatches, objective, denominator, told)

    job.trainer.update = update
    for step in range(1, 1 + count):
        version = job.trainer.policy_version
        _, groups, _ = train_step(job, step)
        for group in groups:
            for sample in group.samples:
                where, spans = f"step {step} prompt {group.prompt.prompt_id} sample {sample.sample_index}", spans_of(sample)
                seen.continued += len(spans) > 1
                bounds = [len(group.prompt.token_ids), *(span.end for span in spans)]
                if [span.start for span in spans] != bounds[:-1] or bounds[-1] != len(sample.token_ids):
                    seen.problems.append(f"{where}: {spans} of {bounds}")
                if int(lags_of(sample, version).max()) > 2 or spans[-1].policy_version > version:
                    seen.problems.append(f"{where}: {spans} at version {version}")
                for tokens, logprobs in kept.get((group.prompt.prompt_id, sample.sample_index), []):
                    if not torch.equal(sample.token_ids[: len(tokens)], tokens) or not torch.equal(
                        sample.rollout_logprobs[: len(tokens)], logprobs
                    ):
                        seen.problems.append(f"{where}: its beginning changed")
        kept = {
            (candidate.group.prompt.prompt_id, sample.sample_index): [(sample.token_ids, sample.rollout_logprobs)]
            for content in all_gather_bytes(job.waiting.to_bytes())  # another rank may go on
            if content
            for candidate in unpack_candidates(content, job.prompts)
            if not candidate.group.rewards
            for sample in candidate.group.samples
        }
    return seen
