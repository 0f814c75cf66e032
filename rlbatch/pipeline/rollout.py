"""Generation: prompts over engine ranks, completions into sample groups, weights into engines."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlbatch.api import Completion, Prompt, RolloutBackend, RolloutError, Sample, SampleGroup, SamplingParams, SleepingBackend
from rlbatch.config.schema import Config
from rlbatch.launch.signals import Interrupted, StopNotice
from rlbatch.pipeline.finished_groups import FinishedGroups, WeightsProbe
from rlbatch.weights.sync import buckets

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

EVAL_SEED = 2**31
"""Takes the place of the step in the seeds of evaluations: every evaluation draws the same random numbers."""
SIGNAL_WAIT_S = 1.0
"""Within it a signal that goes to all processes of a job has reached each of them."""


class Rollout:
    """This rank's engine and its share of the prompts.

    Args:
        backend: The engine.
        tokenizer: Of the model.
        config: Sampling.
        stop_token_ids: Tokens that end a response.
        rank: This engine, of ``num_engines``; None: this rank only sends weights to a neighbour's.
        num_engines: Engines of the job.
        run_dir: Run folder, where finished groups are kept.
        notice: What may interrupt a generation.
        announce: Told of groups that are reused, or could not be.
    """

    def __init__(
        self,
        backend: RolloutBackend,
        tokenizer: PreTrainedTokenizerBase,
        config: Config,
        stop_token_ids: tuple[int, ...],
        rank: int | None,
        num_engines: int,
        run_dir: Path,
        notice: StopNotice,
        announce: Callable[[str], None],
    ) -> None:
        self._backend, self._tokenizer, self._config, self._stops = backend, tokenizer, config, stop_token_ids
        self._rank, self._num_engines = rank, num_engines
        self._run_dir, self._notice, self._announce = run_dir, notice, announce
        self._weights, self._was_interrupted = "", False
        self._version: int | None = None

    def sync_weights(self, tensors: Iterator[tuple[str, Tensor]], policy_version: int) -> None:
        """Sends the policy to the engine; a collective.

        Args:
            tensors: Full Hugging Face tensors, streamed.
            policy_version: Of the policy.
        """
        if self._config.rollout.sync_weights:
            probe = WeightsProbe()
            self._backend.update_weights(buckets(probe.watch(tensors), self._config.rollout.bucket_mib, policy_version))
            self._weights, self._version = probe.digest(), policy_version

    def share(self, num_prompts: int) -> range:
        """Positions of the prompts that this rank generates: dealt out like cards, so that long prompts do not meet."""
        return range(0) if self._rank is None else range(self._rank, num_prompts, self._num_engines)

    def generate(self, prompts: Sequence[Prompt], step: int) -> list[SampleGroup]:
        """Groups for training. Each is kept on disk as soon as it is finished; what an earlier life of the run kept is not sampled again.

        Args:
            prompts: This rank's share.
            step: Part of the samples' seeds.

        Returns:
            One group a prompt, in order; fewer if it was interrupted.
        """
        params = self._params(self._config.rollout.temperature, self._config.algorithm.group_size, step)
        kept = FinishedGroups(self._run_dir, step, self._weights, params, self._config.rollout.name, self._announce)
        found = {prompt.prompt_id: answer for prompt in prompts if self._weights and (answer := kept.load(prompt))}
        if found:
            self._announce(f"step {step}: {len(found)} of {len(prompts)} groups were finished before")
        missing = [prompt for prompt in prompts if prompt.prompt_id not in found]
        for prompt, answer in self._answers(missing, params):
            if self._weights:  # else nobody could tell later by which policy it was sampled
                kept.save(prompt, answer)
            found[prompt.prompt_id] = answer
        self._sleep()
        return [self._group(prompt, found[prompt.prompt_id]) for prompt in prompts if prompt.prompt_id in found]

    def evaluate(self, prompts: Sequence[Prompt]) -> list[SampleGroup]:
        """One sample a prompt at the evaluation temperature; fewer if it was interrupted."""
        params = self._params(self._config.train.eval_temperature, 1, EVAL_SEED)
        answers = list(self._answers(prompts, params))
        self._sleep()
        return [self._group(prompt, answer) for prompt, answer in answers]

    def _params(self, temperature: float, samples: int, step: int) -> SamplingParams:
        return SamplingParams(temperature, self._config.rollout.max_response_tokens, self._stops, samples, (self._config.seed, step))

    def _answers(self, prompts: Sequence[Prompt], params: SamplingParams) -> Iterator[tuple[Prompt, list[Completion]]]:
        """The engine's answers as they become complete, until it is interrupted."""
        if not prompts:
            return
        remaining, answers = iter(prompts), self._until_interrupted(prompts, params)
        for answer in answers:
            prompt = next(remaining, None)
            if prompt is None or len(answer) != params.samples_per_prompt:
                raise self._malformed(len(prompts), params)
            yield prompt, answer
        if next(remaining, None) is not None and not self._was_interrupted:
            raise self._malformed(len(prompts), params)

    def _until_interrupted(self, prompts: Sequence[Prompt], params: SamplingParams) -> Iterator[list[Completion]]:
        self._was_interrupted = False
        try:
            with self._notice.interruptible():
                answers = iter(self._backend.generate(prompts, params))
            while True:
                with self._notice.interruptible():
                    answer = next(answers, None)
                if answer is None:
                    return
                yield answer
        except Interrupted:
            self._was_interrupted = True
        except RolloutError:
            time.sleep(SIGNAL_WAIT_S)
            if not self._notice.is_set:
                raise
            self._was_interrupted = True  # whoever stops the job may have signalled the engine's processes too, and earlier

    def _malformed(self, num_prompts: int, params: SamplingParams) -> RolloutError:
        return RolloutError(
            f"rollout={self._config.rollout.name}: must answer {params.samples_per_prompt} samples for each of {num_prompts} prompts. "
            "Mend the backend."
        )

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
            policy_version=self._checked_version(prompt, completion),
        )

    def _checked_version(self, prompt: Prompt, completion: Completion) -> int:
        known = [version for version in (completion.policy_version, self._version) if version is not None]
        if len(set(known)) > 1:
            raise RolloutError(
                f"rollout={self._config.rollout.name}: prompt {prompt.prompt_id} was sampled by policy version {known[0]}, the engine was "
                f"sent {known[1]}. Mend the backend."
            )
        return known[0] if known else -1

    def _sleep(self) -> None:
        """Gives the accelerator's memory back to the trainer until the next sync."""
        if not self._was_interrupted and isinstance(self._backend, SleepingBackend):
            self._backend.sleep()

    def close(self) -> None:
        """Ends the engine."""
        self._backend.close()


def stop_tokens(tokenizer: Any, generation_config: dict[str, Any]) -> tuple[int, ...]:
    """The tokens that end a response: generation_config.json's ``eos_token_id`` (one or many) and the tokenizer's."""
    listed = generation_config.get("eos_token_id")
    ids = set(listed if isinstance(listed, list) else [listed]) | {tokenizer.eos_token_id}
    return tuple(sorted(token for token in ids if token is not None))
