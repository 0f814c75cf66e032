"""What a plugin hands over: how each extension behaves. Discovery is in ``hookspecs``; no torch is imported here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from rlbatch.api.types import FinishReason, Prompt, Sample, SamplingParams, WeightBucket

if TYPE_CHECKING:
    from torch import Tensor

Reward = Callable[[Sequence[Sample]], Sequence[float]]
"""One finite float a sample, in order. Called on the rank that generated the samples, with whole groups; no collectives."""


@runtime_checkable
class LabelChecker(Protocol):
    """A ``Reward`` that cannot use every label."""

    def check_label(self, label: Any) -> None:
        """Called at submit with the label of each prompt that this reward scores.

        Raises:
            DataError: what a label must be and what this one is; rlbatch puts file, line and the reward's name before it.
        """


def one_rank(options: Any) -> int:
    """``Configurable.ranks_per_engine`` of what every rank has for itself."""
    return 1


@dataclass(frozen=True)
class EngineShape:
    """How an engine divides a model over its GPUs: what submit checks before anything starts.

    Attributes:
        replica_gpus: GPUs that hold one copy of all but the routed experts; they must be on one node.
        replicas: Copies. Routed experts are divided over all GPUs of the engine.
        memory_share: Of each GPU's memory: what the engine takes, weights and cache.
        context_tokens: Longest prompt and response together, with ``context_spare``; 0: not said.
        stages: Pipeline stages of a replica.
        separate_gpus: GPUs of each node that have no rank, but only engines; 0: engines are on the ranks' GPUs.
        asleep: Where the weights are while the trainer trains: on the ``gpu``, beside the cache, in ``host`` memory, or ``gone``.
        fills_share: Whether the cache takes all of ``memory_share`` that weights leave.
        offloaded_gib: Of the weights on each GPU, what the engine keeps in host memory instead, GiB.
        value_bytes: Of a weight that is not quantised; 0: as the trainer's.
        cached_bytes: Of a number in the cache; 0: as ``value_bytes``.
        separate_option: Of ``rollout.options``, what says ``separate_gpus``.
        gone_options: Of ``rollout.options``, with what values weights are ``gone``.
        memory_option: Of ``rollout.engine``, what says ``memory_share``; empty: nothing does.
        context_option: Of ``rollout.engine``, what says ``context_tokens``.
        context_spare: How many of ``context_tokens`` the engine keeps for itself.
        is_share_of_free: Whether ``memory_share`` is one of what is free beside the trainer when the engine starts, not of all.
        cpu_head_sizes: Sizes of attention heads for which it has kernels on CPUs; empty: any. Latent attention has its own.
    """

    replica_gpus: int = 1
    replicas: int = 1
    memory_share: float = 1.0
    context_tokens: int = 0
    stages: int = 1
    separate_gpus: int = 0
    asleep: Literal["gpu", "host", "gone"] = "gone"
    fills_share: bool = True
    offloaded_gib: float = 0.0
    value_bytes: float = 0.0
    cached_bytes: float = 0.0
    separate_option: str = ""
    gone_options: Mapping[str, Any] = field(default_factory=dict)
    memory_option: str = ""
    context_option: str = ""
    context_spare: int = 0
    is_share_of_free: bool = False
    cpu_head_sizes: Sequence[int] = ()

    @property
    def is_colocated(self) -> bool:
        """Whether the trainer is on the same GPUs."""
        return not self.separate_gpus


@dataclass(frozen=True)
class OffloadMemory:
    """What an offload strategy does with the trainer's memory: what submit and the preflight count.

    Attributes:
        releases_gradients: Whether gradients have memory in updates only: not before the first, and not while an engine generates.
        hosted_share: Share of the parameters, in whole tensors, whose optimizer state is on the host, in all phases.
        hosted_bytes: Of host memory, for each of these.
        moves_state: Whether the other optimizer state leaves the accelerator while an engine generates, into host memory that is kept
            from then on.
    """

    releases_gradients: bool = False
    hosted_share: float = 0.0
    hosted_bytes: float = 0.0
    moves_state: bool = False


@dataclass(frozen=True)
class NoOptions:
    """Options of what takes none."""


def no_draft(engine: Mapping[str, Any]) -> str | None:
    """Of an engine that speculates with no weights of its own."""
    return None


def any_engine(options: Any, engine: Mapping[str, Any]) -> None:
    """Of a backend whose engine needs nothing that a machine might lack."""


def any_label(options: Any, label: Any) -> None:
    """Of a reward that takes every JSON value."""


@dataclass(frozen=True)
class Configurable:
    """An extension with options of its own: they become config keys under its group (``reward.options.my_option``).

    Attributes:
        build: Called once a rank with an instance of ``options`` (after the context, where the extension's factory takes one).
        options: A dataclass; every field has a default.
        needs_gpu: Refused at submit where the ranks would run on CPUs.
        ranks_per_engine: Of a rollout backend: how many neighbouring ranks share an engine, given its options.
        has_engine: Of a rollout backend: whether it takes ``rollout.engine.*``.
        spans_nodes: Of a rollout backend: whether the ranks of an engine may be on several nodes. On each the first of them generates.
        engine_shape: Of a rollout backend: how its engine divides the model, given its options and ``rollout.engine.*``; may raise
            ``ConfigError``. None: the ranks of an engine hold one copy.
        check_engine: Of a rollout backend: whether this machine has its engine, with ``rollout.engine.*``; called at submit where ranks
            start on the same machine, and on each node before the model is built; raises ``ConfigError``.
        has_fp8: Of a rollout backend: whether its engine, on GPUs, takes weights that are quantised in blocks (``rollout.quantization``).
        draft: Of a rollout backend: whose weights its engine speculates with, given ``rollout.engine.*``: a Hugging Face folder, empty for
            the layers that the model's family carries, None for none; may raise ``ConfigError``.
        check_label: Of a reward: whether it takes a label, given its options; see ``LabelChecker``.
        offload_memory: Of an offload strategy: what it does with memory, given its options and ``train.precision``; may raise
            ``ConfigError``. None: not known, then all that it could move counts as nothing.
    """

    build: Callable[..., Any]
    options: type
    needs_gpu: bool = False
    ranks_per_engine: Callable[[Any], int] = one_rank
    has_engine: bool = False
    spans_nodes: bool = False
    engine_shape: Callable[[Any, Mapping[str, Any]], EngineShape] | None = None
    check_engine: Callable[[Any, Mapping[str, Any]], None] = any_engine
    has_fp8: bool = False
    draft: Callable[[Mapping[str, Any]], str | None] = no_draft
    check_label: Callable[[Any, Any], None] = any_label
    offload_memory: Callable[[Any, str], OffloadMemory] | None = None


@dataclass(frozen=True)
class Completion:
    """What an engine answers for one sample.

    Attributes:
        token_ids: [R] sampled tokens, the stop token included.
        logprobs: [R] float nats, of the distribution that was sampled from.
        finish_reason: ``stop`` or ``length``.
        policy_version: Of the weights that sampled it, as the engine recorded it; None: it records none.
        seconds: From its beginning to its end in the engine; None: not measured.
    """

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    finish_reason: FinishReason
    policy_version: int | None = None
    seconds: float | None = field(default=None, compare=False)


def alone(content: bytes) -> list[bytes]:
    """``RolloutContext.gather`` of an engine with one rank."""
    return [content]


@dataclass(frozen=True)
class RolloutContext:
    """What a rollout backend is built from.

    Attributes:
        hf_folder: Folder with config.json and tokenizer (the weights arrive by ``update_weights``).
        device: ``cpu`` or ``cuda:<index>``.
        dtype: ``float32`` or ``bfloat16``.
        engine: ``rollout.engine.*``: the engine's own options, by its own names.
        engine_rank: This rank's place among those that share its engine, from 0.
        gather: All-gather of bytes over the ranks of the engine, in their order; also a barrier between them.
        node_rank: This rank's place among those of the engine on this node; the first of them generates, the others get no prompts.
        node_gather: As ``gather``, over the ranks of the engine on this node.
        engine_node: Number of this node among the engine's, from 0.
        engine_nodes: Nodes of the engine; more than one only where the backend ``spans_nodes``.
        address: Of the engine's first node, on the network of the job.
        folder: This engine's own, for logs and the like; made when needed.
        audit_sync: ``rollout.audit_sync``.
    """

    hf_folder: Path
    device: str
    dtype: str
    engine: Mapping[str, Any] = field(default_factory=dict)
    engine_rank: int = 0
    gather: Callable[[bytes], list[bytes]] = alone
    node_rank: int = 0
    node_gather: Callable[[bytes], list[bytes]] = alone
    engine_node: int = 0
    engine_nodes: int = 1
    address: str = "127.0.0.1"
    folder: Path = Path("engine")
    audit_sync: str = "first"


class RolloutBackend(Protocol):
    """An engine on this rank."""

    def generate(self, prompts: Sequence[Prompt], params: SamplingParams) -> Iterable[list[Completion]]:
        """Samples ``params.samples_per_prompt`` completions of each prompt, in order. No collectives.

        Best as a generator that yields each prompt's completions when they are complete: those are kept if the job is stopped, which may
        raise ``rlbatch.launch.shutdown.signals.Interrupted`` (a ``BaseException``) anywhere in here.
        """

    def update_weights(self, buckets: Iterable[WeightBucket]) -> None:
        """Takes every weight of the model, bucket after bucket.

        The iterator runs collectives: it must be consumed to the end on every rank, and a tensor is only valid until the next bucket
        is taken.

        Raises:
            RolloutError: a parameter was not written, or written twice.
        """

    def close(self) -> None:
        """Frees the engine; called once at the end, also after a failure, and before a ``restart``."""


@runtime_checkable
class SleepingBackend(Protocol):
    """A ``RolloutBackend`` whose engine shares the accelerator's memory with the trainer."""

    def sleep(self) -> None:
        """Gives the memory back: called on every rank after each generation, also one that was interrupted, and before a checkpoint is
        restored. ``update_weights`` wakes the engine.
        """


@runtime_checkable
class CarryingBackend(Protocol):
    """A ``RolloutBackend`` whose engine may speculate with weights that the trainer does not have.

    Attributes:
        lacks_carried: Whether the engine has not got them yet, or has lost them. The next ``update_weights`` then begins with buckets that
            are ``is_carried``. The same on all ranks of the engine.
    """

    lacks_carried: bool


@runtime_checkable
class RestartableBackend(Protocol):
    """A ``RolloutBackend`` whose ``generate`` and ``update_weights`` may raise ``EngineLost``, and which can then go on.

    Attributes:
        max_restarts: Of an engine, in this attempt of the job.
    """

    max_restarts: int

    def restart(self) -> None:
        """Starts the engine anew, without weights: called on every rank of a lost engine after ``close`` on all of them, and before
        ``update_weights``. No collectives; a job that is stopped raises ``Interrupted`` in here, as in ``generate``.

        Raises:
            RolloutError: it does not start.
        """


@runtime_checkable
class ExpertParallelBackend(Protocol):
    """A ``RolloutBackend`` whose engine divides the experts of a model: a rank need send its device only those that are there."""

    def wanted_experts(self) -> Sequence[int] | None:
        """Numbers of the routed experts that this rank's device holds, ascending, the same in every layer; None: all.

        Called on every rank after the engine has started. Those of all ranks on a node together are all that the engine has there.
        """


@runtime_checkable
class ForeignBackend(Protocol):
    """A ``RolloutBackend`` that samples in another interpreter than the rank's.

    Attributes:
        software: Tells that interpreter and its packages from others: what one of them has sampled of a step that a run takes up again is
            not mixed with another's.
    """

    software: str


RolloutBackendFactory = Callable[[RolloutContext], RolloutBackend]


@dataclass(frozen=True)
class AdvantageInputs:
    """All samples of the step, over all ranks. N samples with T response tokens together, concatenated in order.

    Attributes:
        rewards: [N] float64, as the reward returned them, less the KL penalty where ``algorithm.kl_reward_coef`` is not 0.
        group_ids: [N] int64, equal for samples of one prompt; groups are contiguous.
        lengths: [N] int64, response tokens of each sample.
        token_rewards: [T] float64: the KL penalty of each token, and the reward on the last token of each sample.
    """

    rewards: Tensor
    group_ids: Tensor
    lengths: Tensor
    token_rewards: Tensor

    def in_groups(self) -> tuple[Tensor, Tensor, Tensor]:
        """Rewards for estimators that compare within a group.

        Returns:
            Rewards less that of the group's first sample [N] float64 (a group of one sample keeps its own), the group of each sample [N]
            from 0, and the samples of each group [G]. The differences of equal rewards are exactly 0, and those of large ones exact: sums
            of them lose nothing to what the rewards have in common.
        """
        from torch import unique_consecutive

        _, group, sizes = unique_consecutive(self.group_ids, return_inverse=True, return_counts=True)
        first = self.rewards[sizes.cumsum(0) - sizes]
        return self.rewards - first.where(sizes > 1, 0.0)[group], group, sizes


AdvantageEstimator = Callable[[AdvantageInputs], "Tensor"]
"""[N] (one advantage a sample, given to each of its tokens) or [T] (one a token), finite in float32, which they become.

Called on every rank with the same inputs, and must answer the same: one that draws random numbers seeds them. No collectives.
"""


def of_one_rank(values: Tensor) -> Tensor:
    """Sums over the ranks that share a pack's sequences, where there is one."""
    return values


@dataclass(frozen=True)
class Sequences:
    """The N sequences that a pack's T tokens belong to, for losses that compare whole responses.

    Of a sequence only tokens that the policy sampled count. Under context parallelism some of them are on other ranks: they count too, in
    the value and in its gradient. So every rank must ask for the same sums and means, in the same order, whatever its tokens are.

    Attributes:
        ids: [T] int64, the sequence of each token.
        sampled: [T] bool, whether the policy sampled the token.
        lengths: [N] float32, sampled tokens of each sequence, wherever they are.
        truncated: [N] bool, whether the response was cut at the length limit.
        over_ranks: [N] -> [N]: the sum over all ranks that share the sequences.
    """

    ids: Tensor
    sampled: Tensor
    lengths: Tensor
    truncated: Tensor
    over_ranks: Callable[[Tensor], Tensor] = of_one_rank

    def sum(self, values: Tensor) -> Tensor:
        """[T] -> [T]: each token gets its sequence's sum over sampled tokens, with the gradient to all of them."""
        return self._totals(values)[self.ids].to(values.dtype)

    def mean(self, values: Tensor) -> Tensor:
        """[T] -> [T]: each token gets its sequence's mean over sampled tokens; 0 where a sequence has none."""
        return (self._totals(values) / self.lengths.double().clamp(min=1.0))[self.ids].to(values.dtype)

    def _totals(self, values: Tensor) -> Tensor:
        kept = values.where(self.sampled, 0.0).double()
        return self.over_ranks(kept.new_zeros(len(self.lengths)).index_add(0, self.ids, kept))


@dataclass(frozen=True)
class PolicyLossInputs:
    """One pack of T tokens; all tensors [T] float32, to be written into. Masked positions hold 0; what is returned there is ignored.

    Attributes:
        logprobs: By the policy being trained; carries the gradient.
        old_logprobs: By the policy before this step's first update.
        rollout_logprobs: As the engine reported them.
        advantages: One a token.
        eps_clip: Lower clip range.
        eps_clip_high: Upper clip range.
        sequences: Whose tokens these are: ``sequences.mean(values)`` and ``sequences.sum(values)``.
    """

    logprobs: Tensor
    old_logprobs: Tensor
    rollout_logprobs: Tensor
    advantages: Tensor
    eps_clip: float
    eps_clip_high: float
    sequences: Sequences


@dataclass(frozen=True)
class PolicyLossOutputs:
    """Per-token results, [T], on the device of the inputs.

    Attributes:
        losses: What is minimised, float32 (or float64), with a gradient by the log-probs; aggregated over tokens or sequences by the
            trainer with one global denominator.
        clipped: 1 where the clip removed the gradient, else 0.
    """

    losses: Tensor
    clipped: Tensor


PolicyLoss = Callable[[PolicyLossInputs], PolicyLossOutputs]
"""Called on the last pipeline stage for every pack; no collectives but those of ``PolicyLossInputs.sequences``."""


@dataclass(frozen=True)
class OptimizerSpec:
    """How to build the optimizer: arguments of Megatron's ``OptimizerConfig`` that an offload strategy may change."""

    arguments: Mapping[str, Any] = field(default_factory=dict)


class MemoryHandles(Protocol):
    """What an offload strategy may move. Filled by the trainer."""

    def optimizer_state(self) -> Iterable[Tensor]:
        """This rank's optimizer state tensors (master weights and moments)."""

    def release_gradients(self) -> None:
        """Gives the memory of this rank's gradients back until the next backward pass, which makes them anew: nothing needs them between
        updates. May be called in every phase but ``training``, again and again.
        """


class OffloadStrategy(Protocol):
    """Who holds the accelerator's memory in which phase."""

    def configure_optimizer(self, spec: OptimizerSpec) -> OptimizerSpec:
        """Called once, before the optimizer is built."""

    def attach(self, handles: MemoryHandles) -> None:
        """Called once, after it is built."""

    def generating(self) -> AbstractContextManager[None]:
        """Around weight sync and generation."""

    def training(self) -> AbstractContextManager[None]:
        """Around log-probs and updates."""


OffloadStrategyFactory = Callable[[], OffloadStrategy]
