"""A job's sets of held-out prompts, and how each is sampled."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from zlib import crc32

from rlbatch.api import Prompt, SamplingParams
from rlbatch.config.evaluation import SIMPLE, eval_sets
from rlbatch.config.schema import Config, EvalSetConfig

EVAL_SEED = 2**31
"""Takes the place of the step in the seeds of evaluations: every evaluation draws the same random numbers."""


@dataclass(frozen=True)
class EvalSet:
    """One set of held-out prompts.

    Attributes:
        name: Its own.
        settings: ``eval.sets.<name>``, or what ``data.eval`` comes to.
        prompts: Its prompts in file order; each names its reward, among the job's.
    """

    name: str
    settings: EvalSetConfig
    prompts: Sequence[Prompt]

    def params(self, seed: int) -> SamplingParams:
        """How the set is sampled with the run's seed, without the tokens that end a response; the same in every evaluation, whatever other
        sets there are.
        """
        settings = self.settings
        own = EVAL_SEED if self.name == SIMPLE else EVAL_SEED + 1 + crc32(self.name.encode())
        assert settings.max_response_tokens is not None
        return SamplingParams(
            settings.temperature, settings.max_response_tokens, (), settings.n, (seed, own), top_p=settings.top_p, top_k=settings.top_k
        )


def with_prompts(config: Config, prompts: Iterable[Sequence[Prompt]]) -> tuple[EvalSet, ...]:
    """The job's sets, given the prompts of each, in order."""
    return tuple(
        EvalSet(name, settings, [replace(prompt, reward_name=prompt.reward_name or _reward(config, name, settings)[0]) for prompt in own])
        for (name, settings), own in zip(eval_sets(config).items(), prompts, strict=True)
    )


def set_rewards(config: Config) -> Mapping[str, tuple[str, Mapping[str, Any]]]:
    """Rewards that sets name: name among the job's rewards -> name of the plugin, and its options."""
    return dict(_reward(config, name, settings) for name, settings in config.eval.sets.items() if settings.reward)


def _reward(config: Config, name: str, settings: EvalSetConfig) -> tuple[str, tuple[str, Mapping[str, Any]]]:
    job = config.reward
    if not settings.reward:
        return job.name, (job.name, job.options)
    key = f"{settings.reward} of eval.sets.{name}" if settings.reward_options else settings.reward
    return key, (settings.reward, settings.reward_options)
