"""This rank's engine: takes weights and this rank's share of the prompts, and gives sample groups.

``generation`` handles the loss of an engine on all ranks.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlbatch.api import (
    CarryingBackend,
    Completion,
    Continued,
    EngineLost,
    ExpertParallelBackend,
    KeptTokens,
    Prompt,
    RestartableBackend,
    RolloutBackend,
    RolloutError,
    Sample,
    SampleGroup,
    SamplingParams,
    SleepingBackend,
    WeightBucket,
)
from rlbatch.checkpoint.carried import Carried
from rlbatch.config.schema import Config
from rlbatch.foreign_code import state_kept
from rlbatch.launch.shutdown.signals import Interrupted, StopNotice
from rlbatch.pipeline.continuing import joined, parts_of, tokens_so_far, unfinished
from rlbatch.pipeline.finished_groups import FinishedGroups, WeightsProbe
from rlbatch.pipeline.mismatch import digit_tokens
from rlbatch.pipeline.route_checks import Routers
from rlbatch.pipeline.waiting_groups import Candidate
from rlbatch.weights.export import buckets

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SIGNAL_WAIT_S = 1.0
"""Seconds within which a signal to all processes of a job has reached each of them."""


@dataclass
class Work:
    """The work of this rank's engine in a step.

    Attributes:
        busy_s: Seconds in which the engine had prompts.
        longest_s: Duration of its slowest sample, seconds; 0 if not measured.
        tokens: Number of sampled tokens.
    """

    busy_s: float = 0.0
    longest_s: float = 0.0
    tokens: int = 0


class Rollout:
    """This rank's engine and its share of the prompts.

    Args:
        backend: Rollout backend of the engine.
        tokenizer: Tokenizer of the model.
        config: Config of the job.
        stop_token_ids: Tokens that end a response.
        rank: Index of this engine among ``num_engines``; None if this rank only sends weights to a neighbour's engine.
        num_engines: Number of engines of the job.
        run_dir: Run folder, where finished groups are kept.
        notice: Signal that may interrupt a generation.
        announce: Called with messages about groups that are reused, or could not be.
        engine: Number of the engine that this rank belongs to, whether it generates or not.
        carried: Weights that the engine speculates with; None: none.
        experts: Names of the routed experts' tensors.
        sampler: ``sampler_key`` of the backend.
        routers: Routers of the model, if the engine has to report the experts of tokens; else None.

    Attributes:
        engine: Number of the engine that this rank belongs to.
        work: Work of this step's generation; replaced with a new one when it is reported.
        lost: Reason for the loss of the engine; None if this rank noticed none.
        restarts: Number of restarts of each of the job's engines in this attempt.
        announce: Called with messages.
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
        engine: int = 0,
        carried: Carried | None = None,
        experts: Container[str] = (),
        sampler: str = "",
        routers: Routers | None = None,
    ) -> None:
        self._backend, self._tokenizer, self._config, self._stops = backend, tokenizer, config, stop_token_ids
        self._rank, self._num_engines = rank, num_engines
        self._run_dir, self._notice, self.announce = run_dir, notice, announce
        self._weights, self._was_interrupted = "", False
        self._digits: Tensor | None = None
        self._name = f"rollout={config.rollout.name}"
        self._version: int | None = None
        self._carried, self._experts, self._sampler, self._routers = carried, experts, sampler, routers
        self.engine, self.work = engine, Work()
        self.lost: EngineLost | None = None
        self.restarts: Counter[int] = Counter()

    def digit_tokens(self, vocab_size: int) -> Tensor:
        """[vocab_size] bool, whether a token has a digit in its text."""
        if self._digits is None or len(self._digits) != vocab_size:
            self._digits = digit_tokens(self._tokenizer, vocab_size)
        return self._digits

    def wanted_experts(self) -> Sequence[int] | None:
        """Indices of the routed experts that this rank's part of the engine needs; None: all. A collective of the engine's ranks."""
        return self._backend.wanted_experts() if isinstance(self._backend, ExpertParallelBackend) else None

    def sync_weights(
        self,
        tensors: Iterator[tuple[str, Tensor]],
        policy_version: int,
        *,
        is_taken: bool = True,
        lasting: Container[int] = (),
        wanted: Sequence[int] | None = None,
        sent: Callable[[], object] = lambda: None,
    ) -> None:
        """Sends the policy to the engine, after the carried weights if the engine lacks them; a collective.

        Args:
            tensors: Full Hugging Face tensors, streamed; always read to the end, also if the engine is lost.
            policy_version: Version of the policy.
            is_taken: Whether the engine gets the weights; else this rank only takes part in the collective.
            lasting: Storages that are not overwritten meanwhile, as in ``buckets``.
            wanted: Result of ``wanted_experts`` with which ``tensors`` were exported.
            sent: Called after the last tensor was read, before the engine allocates its cache.
        """
        if not self._config.rollout.sync_weights:
            return
        probe = WeightsProbe(self._experts)
        watched = probe.watch(tensors)
        if is_taken:
            with self._noticing_loss(), state_kept(self._name):
                self._backend.update_weights(self._buckets(watched, policy_version, lasting, wanted, sent))
        for _ in watched:
            pass
        self._weights, self._version = probe.digest(), policy_version

    def _buckets(
        self,
        policy: Iterator[tuple[str, Tensor]],
        version: int,
        lasting: Container[int],
        wanted: Sequence[int] | None,
        sent: Callable[[], object],
    ) -> Iterator[WeightBucket]:
        """Yields buckets of weights, the policy's last: where a draft shares parameters with the model, its checkpoint has older values."""
        limit = self._config.rollout.bucket_mib
        if self._carried is not None and isinstance(self._backend, CarryingBackend) and self._backend.lacks_carried:
            yield from buckets(self._carried.read(wanted), limit, version, is_carried=True)
        yield from buckets(policy, limit, version, lasting=lasting)
        sent()

    def restart(self) -> None:
        """Restarts a lost engine, see ``RestartableBackend``; it may be lost again at once."""
        assert isinstance(self._backend, RestartableBackend)
        self.lost = None
        try:
            with state_kept(self._name):
                self._backend.restart()
        except EngineLost as error:
            self.lost = error
        except RolloutError as error:  # it did start before, so this is no mistake of its options
            reason, _, rest = str(error).partition("\n")
            self.lost = EngineLost(reason.rstrip("."), rest)

    @property
    def version(self) -> int:
        """Version of the policy that was last sent to the engine; -1 if none was."""
        return -1 if self._version is None else self._version

    @property
    def generates(self) -> bool:
        """Whether this rank asks an engine for samples."""
        return self._rank is not None

    @property
    def max_restarts(self) -> int:
        """Largest number of restarts of an engine; 0 if it cannot be restarted."""
        return self._backend.max_restarts if isinstance(self._backend, RestartableBackend) else 0

    @contextmanager
    def _noticing_loss(self) -> Iterator[None]:
        """Stores the loss of an engine that can be restarted in ``lost`` instead of raising."""
        try:
            yield
        except EngineLost as error:
            if not isinstance(self._backend, RestartableBackend):
                raise
            self.lost = error

    def share(self, num_prompts: int) -> range:
        """Positions of the prompts that this rank generates, dealt out like cards, so that neighbouring long prompts are spread."""
        return range(0) if self._rank is None else range(self._rank, num_prompts, self._num_engines)

    def generate(self, prompts: Sequence[Prompt], step: int) -> Iterator[SampleGroup]:
        """Generates groups for training. Each is kept on disk once finished; groups that an earlier attempt kept are not sampled again.

        Yields:
            One group for each prompt, once it is complete: those that were kept first, then the others in order. Fewer if generation is
            interrupted, or the engine is lost.
        """
        found = self._found_or_sampled([(prompt, ()) for prompt in prompts], self._training_params(step), step)
        yield from (self._group(prompts[place], answer) for place, answer in found)

    def extend(self, candidates: Sequence[Candidate], step: int) -> Iterator[SampleGroup]:
        """Generates the next part of each unfinished response, at most ``sampling.partial_tokens`` tokens; else as ``generate``.

        Groups without samples are begun.
        """
        size, most, part = self._config.algorithm.group_size, self._config.rollout.max_response_tokens, self._config.sampling.partial_tokens
        by_limit: dict[int, list[tuple[Candidate, list[Continued]]]] = {}
        for candidate in candidates:
            indices = unfinished(candidate.group, size, most)
            limit = min(part or most, most - tokens_so_far(candidate.group, indices))
            by_limit.setdefault(limit, []).append((candidate, parts_of(candidate, indices)))
        for limit, asked in sorted(by_limit.items(), reverse=True):
            params = replace(self._training_params(step), samples_per_prompt=1, max_response_tokens=limit)
            found = self._found_or_sampled([(candidate.group.prompt, parts) for candidate, parts in asked], params, step)
            yield from (self._extended(*asked[place], answers) for place, answers in found)

    def _extended(self, candidate: Candidate, parts: Sequence[Continued], answers: Sequence[Completion]) -> SampleGroup:
        prompt, before = candidate.group.prompt, {sample.sample_index: sample for sample in candidate.group.samples}
        for part, answer in zip(parts, answers, strict=True):
            index = part.draw[1]
            own = before.get(index)
            tokens = [*(own.token_ids[len(prompt.token_ids) :].tolist() if own else ()), *answer.token_ids]
            text = self._tokenizer.batch_decode([tokens], skip_special_tokens=True)[0]
            before[index] = joined(prompt, own, self._sample(part, index, answer, ""), text)
        return SampleGroup(prompt, [before[index] for index in sorted(before)])

    def _training_params(self, step: int) -> SamplingParams:
        rollout = self._config.rollout
        params = self._params(rollout.temperature, self._config.algorithm.group_size, step)
        return replace(params, top_p=rollout.top_p, top_k=rollout.top_k, with_routes=self._routers is not None)

    def _found_or_sampled(
        self, asked: Sequence[tuple[Prompt, Sequence[Continued]]], params: SamplingParams, step: int
    ) -> Iterator[tuple[int, list[Completion]]]:
        """Yields places in ``asked`` with the completions of the prompt or of its parts, those on disk first, then the engine's."""
        kept = FinishedGroups(self._run_dir, step, self._weights, params, self._sampler, self.announce)
        found = {place: answer for place, each in enumerate(asked) if self._weights and (answer := kept.load(*each))}
        if found:
            self.announce(f"step {step}: {len(found)} of {len(asked)} groups were finished before")
        yield from found.items()
        missing = [place for place in range(len(asked)) if place not in found]
        wanted = [each for place in missing for each in asked[place][1] or asked[place][:1]]
        answers = self._measured(self._answers(wanted, params))
        for place in missing:
            prompt, parts = asked[place]
            whole = [completion for _, completions in islice(answers, len(parts) or 1) for completion in completions]
            if len(whole) < (len(parts) or params.samples_per_prompt):  # it was interrupted
                break
            if self._weights:  # else nobody could tell later by which policy it was sampled
                kept.save(prompt, whole, parts)
            yield place, whole
        for _ in answers:  # to its end, where it is checked
            pass

    def evaluate(self, prompts: Sequence[Prompt], params: SamplingParams) -> Iterator[SampleGroup]:
        """Generates groups for evaluation, each yielded once it is complete; fewer if interrupted, or the engine is lost.

        Stop tokens of ``params`` are replaced by the engine's.
        """
        params = replace(params, stop_token_ids=self._stops)
        yield from (self._group(prompt, answer) for prompt, answer in self._answers(prompts, params))

    def _measured(self, answers: Iterator[tuple[Prompt, list[Completion]]]) -> Iterator[tuple[Prompt, list[Completion]]]:
        """Passes answers on, and adds them to this step's work."""
        started = time.perf_counter()
        for prompt, completions in answers:
            self.work.tokens += sum(len(completion.token_ids) for completion in completions)
            self.work.longest_s = max([self.work.longest_s, *(completion.seconds or 0.0 for completion in completions)])
            yield prompt, completions
        self.work.busy_s += time.perf_counter() - started

    def _params(self, temperature: float, samples: int, step: int) -> SamplingParams:
        return SamplingParams(temperature, self._config.rollout.max_response_tokens, self._stops, samples, (self._config.seed, step))

    def _answers(self, prompts: Sequence[Prompt], params: SamplingParams) -> Iterator[tuple[Prompt, list[Completion]]]:
        """The engine's answers as they become complete, until it is interrupted or lost."""
        if not prompts or self.lost:
            return
        remaining, answers = iter(prompts), self._until_interrupted(prompts, params)
        for answer in answers:
            prompt = next(remaining, None)
            if prompt is None or len(answer) != params.samples_per_prompt:
                raise self._malformed(len(prompts), params)
            yield prompt, answer
        if next(remaining, None) is not None and not self._was_interrupted and not self.lost:
            raise self._malformed(len(prompts), params)

    def _until_interrupted(self, prompts: Sequence[Prompt], params: SamplingParams) -> Iterator[list[Completion]]:
        self._was_interrupted = False
        try:
            with self._noticing_loss():
                with state_kept(self._name), self._notice.interruptible():
                    answers = iter(self._backend.generate(prompts, params))
                while True:
                    with state_kept(self._name), self._notice.interruptible():
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
            "Fix the backend."
        )

    def _group(self, prompt: Prompt, completions: Sequence[Completion]) -> SampleGroup:
        texts = self._tokenizer.batch_decode([list(c.token_ids) for c in completions], skip_special_tokens=True)
        return SampleGroup(prompt, [self._sample(prompt, i, c, text) for i, (c, text) in enumerate(zip(completions, texts, strict=True))])

    def _sample(self, prompt: Prompt, index: int, completion: Completion, text: str) -> Sample:
        which = f"rollout={self._config.rollout.name}: prompt {prompt.prompt_id} sample {index} has"
        tokens, logprobs = completion.token_ids, completion.logprobs
        if not tokens or len(tokens) != len(logprobs):
            raise RolloutError(f"{which} {len(tokens)} tokens and {len(logprobs)} log-probs; every token needs one. Fix the backend.")
        broken = [place for place, value in enumerate(logprobs) if not math.isfinite(value)]
        if broken:
            raise RolloutError(
                f"{which} the log-prob {logprobs[broken[0]]} at token {broken[0]}, by policy version {self._version}; must be finite. The "
                "weights that the engine was sent are: if train/grad_norm grew without end, lower optimizer.lr; else mend the backend."
            )
        before, given = len(prompt.token_ids), completion.routes
        return Sample(
            prompt=prompt,
            sample_index=index,
            token_ids=torch.tensor([*prompt.token_ids, *completion.token_ids]),
            loss_mask=torch.tensor([0.0] * before + [1.0] * len(completion.token_ids)),
            rollout_logprobs=torch.tensor([0.0] * before + [float(value) for value in completion.logprobs]),
            response=text,
            finish_reason=completion.finish_reason,
            policy_version=self._checked_version(prompt, completion),
            kept=self._kept(which, before, completion),
            routes=None if self._routers is None or given is None else self._routers.checked(which, given, before + len(tokens)),
        )

    def _kept(self, which: str, before: int, completion: Completion) -> KeptTokens | None:
        """The vocabularies that tokens were chosen from, with none for the ``before`` tokens of the prompt; None: always the whole one."""
        if completion.kept is None:
            return None
        pairs = enumerate(zip(completion.token_ids, completion.kept, strict=True))
        wrong = next((place for place, (token, kept) in pairs if token not in kept), None)
        if wrong is not None:
            raise RolloutError(f"{which} at token {wrong} one that is not among those it was chosen from. Fix the backend.")
        ids = [token for kept in completion.kept for token in sorted(kept)]
        return KeptTokens(torch.tensor(ids, dtype=torch.int32), torch.tensor([0] * before + [len(kept) for kept in completion.kept]))

    def _checked_version(self, prompt: Prompt, completion: Completion) -> int:
        known = [version for version in (completion.policy_version, self._version) if version is not None]
        if len(set(known)) > 1:
            raise RolloutError(
                f"rollout={self._config.rollout.name}: prompt {prompt.prompt_id} was sampled by policy version {known[0]}, the engine was "
                f"sent {known[1]}. Fix the backend."
            )
        return known[0] if known else -1

    def sleep(self) -> None:
        """Frees the engine's GPU memory for the trainer until the next sync.

        Every rank calls this once no engine generates: the parts of an engine on several nodes work in lockstep.
        """
        if isinstance(self._backend, SleepingBackend):
            with state_kept(self._name):
                self._backend.sleep()

    def close(self) -> None:
        """Ends the engine."""
        self._backend.close()
