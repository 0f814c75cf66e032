"""What a plugin hands over: how each extension behaves. Discovery is in ``hookspecs``; no torch is imported here."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from rlbatch.api.types import FinishReason, Prompt, Sample, SampleGroup, SamplingParams, WeightBucket

if TYPE_CHECKING:
    from torch import Tensor

Score = float | Mapping[str, float]
"""The reward of one sample: a finite float, or named parts; it is their sum, or the part ``total`` where there is one."""
Reward = Callable[[Sequence[Sample]], Sequence[Score]] | Callable[[Sequence[Sample]], Coroutine[Any, Any, Sequence[Score]]]
"""One score a sample, in order. Called in a worker process of the rank that generated them, with whole groups (see ``RewardSpec.scope``);
no collectives. It may be an ``async def``.
"""


@runtime_checkable
class PreparedReward(Protocol):
    """A ``Reward`` that loads something heavy."""

    def prepare(self) -> None:
        """Called once on each rank, in the process of which its workers are copies: what is imported and read here, each of them has. It
        may start no threads.
        """


@runtime_checkable
class LabelChecker(Protocol):
    """A ``Reward`` that cannot use every label."""

    def check_label(self, label: Any) -> None:
        """Called at submit with the label of each prompt that this reward scores.

        Raises:
            DataError: what a label must be and what this one is; rlbatch puts file, line and the reward's name before it.
        """


GroupFilter = Callable[[SampleGroup], bool]
"""Whether a step may train on a group, which has all its samples and their rewards. Called on the rank that generated it; no collectives.

Must depend on the group alone: the set of accepted groups is the same for every layout.
"""


@runtime_checkable
class AnswerReader(Protocol):
    """A ``Reward`` that can tell a response's final answer."""

    def answer(self, sample: Sample) -> str | None:
        """Called in evaluations: samples of a prompt with equal answers vote together in ``majority@k``. None: there is no answer."""


@dataclass(frozen=True)
class TrackerContext:
    """What a tracker is opened with.

    Attributes:
        run_dir: The run folder; a tracker's own files go into a folder of its name there.
        run_id: The run's id, the same in all its attempts.
        name: The run folder's name.
        config: Every key and value, without secrets.
        done: Step that this attempt goes on after; 0: from the start. Later steps are done again, and reported again.
    """

    run_dir: Path
    run_id: str
    name: str
    config: Mapping[str, Any]
    done: int = 0


class Tracker(Protocol):
    """What takes a run's metrics, on rank 0 only. All calls come from one thread, its own unless its ``TrackerSpec`` is ``in_step``.

    What a call raises, or one that does not come back, is told once; the run goes on without the tracker.
    """

    def record(self, step: int, metrics: Mapping[str, float]) -> None:
        """Takes what is known of a step, by tag; NaN and infinity are possible. A step may come twice, with other tags.

        Step 0 is the evaluation before the first one.
        """

    def close(self, status: str) -> None:
        """Writes all that there is; called once at the end, which is ``finished``, ``failed`` or ``interrupted``. It has seconds."""


@runtime_checkable
class SampleTracker(Protocol):
    """A ``Tracker`` that takes samples too."""

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Takes the samples of a step: rows as in the run folder's ``samples/``; ``sample_table`` makes a table of them."""


@runtime_checkable
class TableTracker(Protocol):
    """A ``Tracker`` that takes tables too."""

    def table(self, step: int, tag: str, markdown: str) -> None:
        """Takes the table of an evaluation's set."""


TrackerFactory = Callable[[TrackerContext], Tracker]
"""Opens a tracker."""


@dataclass(frozen=True)
class Completion:
    """What an engine answers for one sample.

    Attributes:
        token_ids: [R] sampled tokens, the stop token included.
        logprobs: [R] float nats, of the distribution that was sampled from.
        finish_reason: ``stop`` or ``length``.
        policy_version: Version of the weights that sampled it, as the engine recorded it; None: it records none.
        seconds: Seconds from its beginning to its end in the engine; None: not measured.
        kept: The tokens that each one was chosen from, itself among them; None: the whole vocabulary. Needed where
            ``SamplingParams.is_truncated``, by a backend that ``returns_kept_tokens``; evaluation does without.
        routes: [T, layers with experts (or all layers), K] integers on the host, the experts of each token of the prompt and of the
            response, from the first on; less than 0: not known, as of tokens that are left out at the end. None: of none. Asked for by
            ``SamplingParams.with_routes``, of a backend that ``returns_routes``.
    """

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    finish_reason: FinishReason
    policy_version: int | None = None
    seconds: float | None = field(default=None, compare=False)
    kept: Sequence[Sequence[int]] | None = None
    routes: Tensor | None = field(default=None, compare=False)


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
        node_gather: The same as ``gather``, over the ranks of the engine on this node.
        engine_node: Number of this node among the engine's, from 0.
        engine_nodes: Nodes of the engine; more than one only where the backend ``spans_nodes``.
        address: Address of the engine's first node on the network of the job.
        folder: This engine's own, for logs and the like; made when needed.
        audit_sync: ``rollout.audit_sync``.
        audit_interval: ``rollout.audit_interval``.
        with_routes: Whether ``SamplingParams.with_routes`` may be set.
        starts_later: Whether the backend only begins its start, beside the trainer's, and leaves the accelerator alone until ``start``
            (``RolloutSpec.starts_beside``).
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
    audit_interval: int = 0
    with_routes: bool = False
    starts_later: bool = False


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
class StartingBackend(Protocol):
    """A ``RolloutBackend`` that was told ``RolloutContext.starts_later``."""

    def start(self) -> None:
        """Ends the start that its build began, once the trainer is there; on every rank.

        Raises:
            RolloutError: it does not start.
        """


@runtime_checkable
class RestartableBackend(Protocol):
    """A ``RolloutBackend`` whose ``generate`` and ``update_weights`` may raise ``EngineLost``, and which can then go on.

    Attributes:
        max_restarts: Most restarts of an engine in this attempt of the job.
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
        truncated: [N] bool, whether the response was cut at the length limit. With ``algorithm.mask_truncated`` none is: such samples are
            left out.
        old_logprobs: [T] float64 nats, by the policy before this step's first update; None unless the estimator ``needs_reference``.
        ref_logprobs: [T] float64 nats, by the reference model; None unless the estimator ``needs_reference``.
        lags: [N] int64, how many policy versions (optimizer updates) before the step's first one the oldest token of each sample was
            sampled: 0 of all, but with ``sampling.*``. In a run it is always there.
    """

    rewards: Tensor
    group_ids: Tensor
    lengths: Tensor
    token_rewards: Tensor
    truncated: Tensor
    old_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    lags: Tensor | None = None

    def in_groups(self) -> tuple[Tensor, Tensor, Tensor]:
        """Rewards for estimators that compare within a group.

        Returns:
            Rewards less that of the group's first sample [N] float64 (a group of one sample keeps its own), the group of each sample [N]
            from 0, and the samples of each group [G]. The differences of equal rewards are exactly 0, and those of large ones exact: sums
            of them lose nothing to what the rewards have in common.
        """
        from torch import arange, unique

        _, group, sizes = unique(self.group_ids, return_inverse=True, return_counts=True)
        place = arange(len(group), device=group.device)
        first = self.rewards[sizes.new_full(sizes.shape, len(group)).scatter_reduce(0, group, place, "amin")]
        return self.rewards - first.where(sizes > 1, 0.0)[group], group, sizes


AdvantageEstimator = Callable[[AdvantageInputs], "Tensor"]
"""[N] (one advantage a sample, given to each of its tokens) or [T] (one a token), finite in float32, which they become.

Called on every rank with the same inputs, and must answer the same: one that draws random numbers seeds them. No collectives.
"""


def of_one_rank(values: Tensor) -> Tensor:
    """The sum over the ranks that share a pack's sequences if only one rank has them: the values as they are."""
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
        """[T] -> [T]: each token gets its sequence's sum over sampled tokens, with the gradient to all of them; of integers as floats."""
        return self._totals(values)[self.ids].type_as(values / 1)

    def mean(self, values: Tensor) -> Tensor:
        """[T] -> [T]: each token gets its sequence's mean over sampled tokens; 0 where a sequence has none."""
        return (self._totals(values) / self.lengths.double().clamp(min=1.0))[self.ids].type_as(values / 1)

    def _totals(self, values: Tensor) -> Tensor:
        kept = values.double().where(self.sampled, 0.0)
        return self.over_ranks(kept.new_zeros(len(self.lengths)).index_add(0, self.ids, kept))


@dataclass(frozen=True)
class PolicyLossInputs:
    """One pack of T tokens; all tensors [T] float32, to be written into. Masked positions hold 0; what is returned there is ignored.

    Attributes:
        logprobs: Log-probs by the policy being trained; they carry the gradient.
        old_logprobs: Log-probs by the policy before this step's first update.
        rollout_logprobs: Log-probs as the engine reported them.
        advantages: One a token.
        eps_clip: Lower clip range.
        eps_clip_high: Upper clip range.
        sequences: Whose tokens these are: ``sequences.mean(values)`` and ``sequences.sum(values)``.
        ref_logprobs: Log-probs by the reference model; None where no key and no plugin needs them.
        lags: int64, how many policy versions (optimizer updates) before the step's first one each token was sampled: 0 of all, but with
            ``sampling.*``. In a run it is always there.
    """

    logprobs: Tensor
    old_logprobs: Tensor
    rollout_logprobs: Tensor
    advantages: Tensor
    eps_clip: float
    eps_clip_high: float
    sequences: Sequences
    ref_logprobs: Tensor | None = None
    lags: Tensor | None = None


@dataclass(frozen=True)
class PolicyLossOutputs:
    """Per-token results, [T], on the device of the inputs.

    Attributes:
        losses: What is minimised, float32 (or float64), with a gradient by the log-probs; aggregated over tokens or sequences by the
            trainer with one global denominator.
        clipped: 1 where a bound of the loss is active, so that the gradient is not that of the ratio, else 0.
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
        """This rank's optimizer state on the accelerator: fp32 main weights, and moments once there was an update. Each has storage of its
        own, which may be emptied and filled again; so have ``weights``.
        """

    def weights(self) -> Iterable[Tensor]:
        """The buffers in which all weights of this rank lie."""

    def host_memory(self, num_bytes: int, *, is_pinned: bool) -> Tensor:
        """New host memory of exactly this size, [num_bytes] uint8, page-locked if ``is_pinned`` and there is an accelerator, for as
        long as somebody has the tensor.

        Raises:
            ConfigError: the host has not so much, or cannot lock it; with both numbers.
        """

    def release_gradients(self) -> None:
        """Gives the memory of this rank's gradients back until the next backward pass, which makes them anew: nothing needs them between
        updates. May be called in every phase but ``training``, again and again.
        """


class OffloadStrategy(Protocol):
    """Decides who holds the accelerator's memory in which phase. The methods here do nothing; a subclass has those that do something.

    Attributes:
        moves_weights: Whether weights leave the accelerator in ``sync_ends``. Then no engine reads them in place, engines start and sleep
            once while they are away, and all engines sleep and take the weights again where one was lost.
    """

    moves_weights: bool = False

    def configure_optimizer(self, spec: OptimizerSpec) -> OptimizerSpec:
        """Called once, before the optimizer is built."""
        return spec

    def attach(self, handles: MemoryHandles) -> None:
        """Called once, after the optimizer is built."""
        return

    def generating(self) -> AbstractContextManager[None]:
        """A context around weight sync and generation, with ``moves_weights`` also around engines' start; after it, weights are back."""
        return nullcontext()

    def sync_begins(self) -> None:
        """Called in ``generating`` before weights are read for engines: they must be on the accelerator. Again if an engine was lost."""
        return

    def sync_ends(self) -> None:
        """Called when engines have all weights, before they take memory for their caches; maybe again, and without ``sync_begins``."""
        return

    def training(self) -> AbstractContextManager[None]:
        """A context around log-probs and updates. When it ends, nobody writes to weights and optimizer state until the next ``generating``,
        but for a checkpoint that is loaded.
        """
        return nullcontext()

    def settle(self) -> None:
        """Called before optimizer state is read or written: afterwards what still moved has arrived for the current stream."""
        return


OffloadStrategyFactory = Callable[[], OffloadStrategy]
