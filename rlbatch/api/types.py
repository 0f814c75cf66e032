"""What flows through a step.

Convention: ``logprobs[t]`` scores ``token_ids[t]`` given ``token_ids[:t]``, float32 nats; index 0 is masked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Prompt:
    """One row of a prompt file.

    Attributes:
        prompt_id: Position of the row in its file, from 0.
        text: The prompt as the model reads it (after the chat template, if one is used).
        token_ids: [P] the tokens of ``text``.
        label: What the reward compares with; any JSON value.
        reward_name: Reward for this row; empty for the job's ``reward``.
        metadata: The row's remaining fields.
    """

    prompt_id: int
    text: str
    token_ids: tuple[int, ...]
    label: Any = None
    reward_name: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Continued(Prompt):
    """A response that goes on, for an engine: ``token_ids`` are the prompt's and the response's so far, and one sample is drawn.

    Attributes:
        draw: What names its random numbers in the place of prompt id and sample index; see ``draw_key``.
    """

    draw: tuple[int, ...] = ()


@dataclass(frozen=True)
class KeptTokens:
    """The tokens that an engine chose from, where that was not the whole vocabulary (``rollout.top_p``, ``rollout.top_k``).

    Attributes:
        ids: [K] int32 token ids, position after position, ascending at each.
        counts: [L] int64, how many of ``ids`` belong to each position; 0: the whole vocabulary.
    """

    ids: Tensor
    counts: Tensor


@dataclass(frozen=True)
class Routes:
    """The experts that tokens went to, in some or all of the layers with experts, which are in the model's order.

    Attributes:
        experts: [T, layers, K] uint8, or int16 where a layer has more than 256 experts; a token's are distinct in each layer. Any where not
            known.
        known: [T] bool.
    """

    experts: Tensor
    known: Tensor

    def at(self, positions: Any) -> Routes:
        """The routes of some tokens; ``positions`` is whatever indexes a tensor."""
        return Routes(self.experts[positions], self.known[positions])


class Span(NamedTuple):
    """Tokens of a sample that one policy sampled.

    Attributes:
        policy_version: Version of the policy.
        start: First of them in ``Sample.token_ids``.
        end: Behind the last.
    """

    policy_version: int
    start: int
    end: int


@dataclass
class Sample:
    """One response to one prompt. L = prompt tokens + response tokens.

    Attributes:
        prompt: The prompt that it answers.
        sample_index: Position in its group, from 0.
        token_ids: [L] int64, prompt then response (the stop token included).
        loss_mask: [L] float32, 1 on tokens that the policy sampled, 0 elsewhere.
        rollout_logprobs: [L] float32 nats at the sampling temperature; 0 where masked.
        response: The response as text, without special tokens.
        finish_reason: ``stop`` if a stop token ended it, ``length`` if the limit did.
        policy_version: Version of the weights that sampled it, or the last part of it; -1: unknown.
        spans: Who sampled which tokens, from the response's first to its last, where versions are known; empty: ``policy_version`` all.
        routes: Routes of the L tokens, as the engine routed them when it sampled, in all layers with experts; None: not known.
    """

    prompt: Prompt
    sample_index: int
    token_ids: Tensor
    loss_mask: Tensor
    rollout_logprobs: Tensor
    response: str
    finish_reason: FinishReason
    policy_version: int = -1
    kept: KeptTokens | None = None
    spans: tuple[Span, ...] = ()
    routes: Routes | None = None

    @property
    def response_length(self) -> int:
        """Sampled tokens, the stop token included."""
        return len(self.token_ids) - len(self.prompt.token_ids)


@dataclass
class SampleGroup:
    """All samples of one prompt; never split before advantages are computed.

    Attributes:
        prompt: The prompt.
        samples: ``algorithm.group_size`` samples, in the order of their ``sample_index``.
        rewards: One finite float a sample; empty before scoring, and of a group that is dropped.
        parts: Named parts of each sample's reward, where it has some.
        failures: Why a sample got no verdict: ``error`` or ``timeout``; empty of one that got it.
        answers: Each sample's final answer, in evaluations; None for a sample without one.
    """

    prompt: Prompt
    samples: list[Sample]
    rewards: list[float] = field(default_factory=list)
    parts: list[Mapping[str, float]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    answers: list[str | None] = field(default_factory=list)


@dataclass(frozen=True)
class SamplingParams:
    """How to sample.

    Attributes:
        temperature: Softmax temperature; 0 means the most likely token.
        max_response_tokens: Limit of sampled tokens a sample.
        stop_token_ids: Tokens that end a sample (kept in it).
        samples_per_prompt: Samples of each prompt.
        seed: (run seed, step): with the prompt id and the sample index it determines a sample; see ``draw_key``.
        top_p: Tokens are chosen from the fewest, most likely first, whose probabilities reach this sum; 1: from all.
        top_k: Tokens are chosen from this many, the most likely; 0: from all. With both, ``top_p`` counts among these.
        with_routes: Whether the completions must say to which experts tokens went (``Completion.routes``).
    """

    temperature: float
    max_response_tokens: int
    stop_token_ids: tuple[int, ...]
    samples_per_prompt: int
    seed: tuple[int, int]
    top_p: float = 1.0
    top_k: int = 0
    with_routes: bool = False

    @property
    def is_truncated(self) -> bool:
        """Whether some tokens cannot be chosen."""
        return self.top_p < 1 or self.top_k > 0


def draw_key(params: SamplingParams, prompt: Prompt, index: int) -> tuple[int, ...]:
    """What a sample's random numbers follow from, and nothing else: what a backend seeds them with.

    Args:
        params: The parameters of the call.
        prompt: A prompt, or a response that goes on (``Continued``).
        index: The sample's index.
    """
    return (*params.seed, *(prompt.draw if isinstance(prompt, Continued) else (prompt.prompt_id, index)))


@dataclass(frozen=True)
class WeightBucket:
    """Hugging Face tensors on their way to an engine.

    Attributes:
        names: Checkpoint names, one a tensor (experts one by one).
        tensors: Full (unsharded) tensors; the receiver may not keep them.
        policy_version: Number of optimizer updates that made these weights; of carried ones, of the policy that they go before.
        lasting: Whether each tensor stays as it is until the sync is over, because it lies in the trainer's own memory; empty: none does.
        is_carried: Whether the tensors are what the engine speculates with: not trained, and from a checkpoint.
    """

    names: Sequence[str]
    tensors: Sequence[Tensor]
    policy_version: int
    lasting: Sequence[bool] = ()
    is_carried: bool = False


@dataclass
class Microbatch:
    """A pack of whole sequences, concatenated (thd). T tokens, N sequences; padding is masked.

    Attributes:
        token_ids: [T] int64.
        cu_seqlens: [N+1] int32, where each sequence starts; the last entry is T.
        loss_mask: [T] float32; 0 on prompts, padding and the first token of each sequence.
        advantages: [T] float32; 0 where masked.
        rollout_logprobs: [T] float32 nats; 0 where masked.
        sequence_ids: [T] int64, the token's sequence, from 0.
        sampled_tokens: [N] float32, unmasked tokens of each sequence.
        truncated: [N] bool, whether the sequence was cut at the length limit.
        old_logprobs: [T] float32 nats, by the policy before this step's first update; None before they are computed, which for that
            update's own packs may be in its forward pass.
        ref_logprobs: [T] float32 nats, by the reference model; None if nothing needs them.
        kept: What each of the T tokens was chosen from: all log-probs are of the distribution over these alone; None: the whole vocabulary.
        lags: [T] int64, how many policy versions (optimizer updates) before the step's first one each token was sampled; 0 where masked;
            None: 0 everywhere.
        routes: Routes of the T tokens, in the layers with experts that this rank has; None: the routers choose.
    """

    token_ids: Tensor
    cu_seqlens: Tensor
    loss_mask: Tensor
    advantages: Tensor
    rollout_logprobs: Tensor
    sequence_ids: Tensor
    sampled_tokens: Tensor
    truncated: Tensor
    old_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    kept: KeptTokens | None = None
    lags: Tensor | None = None
    routes: Routes | None = None


@dataclass(frozen=True)
class StepResult:
    """What one step did.

    Attributes:
        step: Number of the step, from 1.
        policy_version: Optimizer updates so far.
        metrics: Tag -> value; the tags are in ``rlbatch.metrics.names``.
    """

    step: int
    policy_version: int
    metrics: Mapping[str, float]
