"""Generation: prompts over engine ranks, completions into sample groups, weights into engines."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlbatch.api import Completion, Prompt, RolloutBackend, RolloutError, Sample, SampleGroup, SamplingParams
from rlbatch.config.schema import Config
from rlbatch.weights.sync import buckets

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

EVAL_SEED = 2**31
"""Takes the place of the step in the seeds of evaluations: every evaluation draws the same random numbers."""


class Rollout:
    """This rank's engine and its share of the prompts.

    Args:
        backend: The engine.
        tokenizer: Of the model.
        config: Sampling.
        stop_token_ids: Tokens that end a response.
        rank: This engine, of ``num_engines``.
        num_engines: Engines of the job.
    """

    def __init__(
        self,
        backend: RolloutBackend,
        tokenizer: PreTrainedTokenizerBase,
        config: Config,
        stop_token_ids: tuple[int, ...],
        rank: int,
        num_engines: int,
    ) -> None:
        self._backend, self._tokenizer, self._config, self._stops = backend, tokenizer, config, stop_token_ids
        self._rank, self._num_engines = rank, num_engines

    def sync_weights(self, tensors: Iterator[tuple[str, Tensor]], policy_version: int) -> None:
        """Sends the policy to the engine; a collective.

        Args:
            tensors: Full Hugging Face tensors, streamed.
            policy_version: Of the policy.
        """
        if self._config.rollout.sync_weights:
            self._backend.update_weights(buckets(tensors, self._config.rollout.bucket_mib, policy_version))

    def share(self, num_prompts: int) -> range:
        """Positions of the prompts that this rank generates: dealt out like cards, so that long prompts do not meet."""
        return range(self._rank, num_prompts, self._num_engines)

    def generate(self, prompts: Sequence[Prompt], step: int) -> list[SampleGroup]:
        """Groups for training.

        Args:
            prompts: This rank's share.
            step: Part of the samples' seeds.
        """
        return self._generate(prompts, self._config.rollout.temperature, self._config.algorithm.group_size, step)

    def evaluate(self, prompts: Sequence[Prompt]) -> list[SampleGroup]:
        """One sample a prompt at the evaluation temperature."""
        return self._generate(prompts, self._config.train.eval_temperature, 1, EVAL_SEED)

    def _generate(self, prompts: Sequence[Prompt], temperature: float, samples: int, step: int) -> list[SampleGroup]:
        if not prompts:
            return []
        params = SamplingParams(temperature, self._config.rollout.max_response_tokens, self._stops, samples, (self._config.seed, step))
        answers = self._backend.generate(prompts, params)
        if [len(completions) for completions in answers] != [samples] * len(prompts):
            raise RolloutError(
                f"rollout={self._config.rollout.name}: must answer {samples} samples for each of {len(prompts)} prompts. Mend the backend."
            )
        return [self._group(prompt, completions) for prompt, completions in zip(prompts, answers, strict=True)]

    def _group(self, prompt: Prompt, completions: Sequence[Completion]) -> SampleGroup:
        texts = self._tokenizer.batch_decode([list(c.token_ids) for c in completions], skip_special_tokens=True)
        return SampleGroup(prompt, [self._sample(prompt, i, c, text) for i, (c, text) in enumerate(zip(completions, texts, strict=True))])

    def _sample(self, prompt: Prompt, index: int, completion: Completion, text: str) -> Sample:
        if (
            not completion.token_ids
            or len(completion.token_ids) != len(completion.logprobs)
            or not all(map(math.isfinite, completion.logprobs))
        ):
            raise RolloutError(
                f"rollout={self._config.rollout.name}: prompt {prompt.prompt_id} sample {index} has {len(completion.token_ids)} tokens and "
                f"{len(completion.logprobs)} log-probs; every token needs a finite one. Mend the backend."
            )
        before = len(prompt.token_ids)
        return Sample(
            prompt=prompt,
            sample_index=index,
            token_ids=torch.tensor([*prompt.token_ids, *completion.token_ids]),
            loss_mask=torch.tensor([0.0] * before + [1.0] * len(completion.token_ids)),
            rollout_logprobs=torch.tensor([0.0] * before + [float(value) for value in completion.logprobs]),
            response=text,
            finish_reason=completion.finish_reason,
        )

    def close(self) -> None:
        """Ends the engine."""
        self._backend.close()


def stop_tokens(tokenizer: Any, generation_config: dict[str, Any]) -> tuple[int, ...]:
    """The tokens that end a response: generation_config.json's ``eos_token_id`` (one or many) and the tokenizer's."""
    listed = generation_config.get("eos_token_id")
    ids = set(listed if isinstance(listed, list) else [listed]) | {tokenizer.eos_token_id}
    return tuple(sorted(token for token in ids if token is not None))
