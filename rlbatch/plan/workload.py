"""Describes the samples of a step: how many there are, how long they are, and how they are packed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, cached_property

from rlbatch.config.schema import Config
from rlbatch.plan.layout import Degrees, microbatch_count

POINTS = 512
"""Number of points at which the distribution of response lengths is tabulated."""
PROMPT_SHARE, RESPONSE_SHARE, DEFAULT_PROMPT = 8, 4, 256


@dataclass(frozen=True)
class Workload:
    """The samples of a step; lengths are in tokens.

    Attributes:
        samples: Number of samples: prompts x ``algorithm.group_size``.
        prompt: Mean length of a prompt.
        response: Mean length of a response.
        longest_prompt: Greatest length of a prompt; the mean if there is no limit.
        longest_response: Greatest length of a response.
        surviving: Share of responses that are longer than (i + 0.5) / ``POINTS`` of the greatest length, for i from 0.
    """

    samples: int
    prompt: float
    response: float
    longest_prompt: int
    longest_response: int
    surviving: tuple[float, ...]

    @property
    def tokens(self) -> float:
        """Number of tokens of all samples, prompts included."""
        return self.samples * (self.prompt + self.response)

    @cached_property
    def squares(self) -> float:
        """Sum over samples of (prompt + response)^2, with all prompts of the mean length."""
        step = self.longest_response / POINTS
        squared = sum(2 * (index + 0.5) * step * step * share for index, share in enumerate(self.surviving))  # E[R^2]
        return self.samples * (self.prompt**2 + 2 * self.prompt * self.response + squared)

    @property
    def longest(self) -> int:
        """Greatest length of a sample, prompt included."""
        return self.longest_prompt + self.longest_response


def workload(config: Config) -> Workload:
    """The samples of a training step; response lengths are lognormal, cut at their limit."""
    assume, most = config.plan.assume, config.rollout.max_response_tokens
    limit = config.data.max_prompt_tokens
    prompt = assume.mean_prompt_tokens or (max(limit // PROMPT_SHARE, 1) if limit else DEFAULT_PROMPT)
    response = assume.mean_response_tokens or max(most / RESPONSE_SHARE, 1)
    surviving = _surviving(response / most, assume.response_spread)
    samples = config.train.prompts_per_step * config.algorithm.group_size
    return Workload(samples, prompt, response, max(limit or 0, prompt), most, surviving)


def pack_tokens(config: Config, work: Workload) -> int:
    """Largest number of tokens of a rank in a microbatch: a sample that is longer than a pack forms its own."""
    return max(config.train.pack_tokens, -(-work.longest // config.layout.cp_size))


def microbatches(config: Config, work: Workload, over: Degrees) -> int:
    """Microbatches of an update on each data-parallel rank."""
    return microbatch_count(config.layout, _packs(config, work, over))


def microbatch_tokens(config: Config, work: Workload, over: Degrees) -> float:
    """Mean tokens of a microbatch, on all ranks that share it; with an interleaved pipeline, tokens of the longest, which is full."""
    mean = work.tokens / config.train.updates_per_step / over.dp_size / _packs(config, work, over)
    return mean / config.plan.assume.pack_fullness if config.layout.vpp_size > 1 else mean


def _packs(config: Config, work: Workload, over: Degrees) -> int:
    """Packs of an update on each data-parallel rank."""
    packed = config.train.pack_tokens * config.layout.cp_size * config.plan.assume.pack_fullness
    tokens = work.tokens / config.train.updates_per_step / over.dp_size
    samples = work.samples / config.train.updates_per_step / over.dp_size
    return max(1, min(math.ceil(tokens / packed), math.ceil(samples)))


@cache
def _surviving(mean: float, spread: float) -> tuple[float, ...]:
    """Shares of a lognormal distribution, cut at 1, above each of ``POINTS`` points; the cut distribution has the given mean."""
    if mean >= 1:
        return (1.0,) * POINTS
    logs = [math.log((index + 0.5) / POINTS) for index in range(POINTS)]

    def shares(middle: float) -> tuple[float, ...]:
        return tuple(math.erfc((log - middle) / (spread * math.sqrt(2))) / 2 for log in logs)

    low, high = -20.0, 20.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(shares(middle)) / POINTS < mean else (low, middle)
    return shares((low + high) / 2)
