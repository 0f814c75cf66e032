"""What a plugin says of what it registers: options, and what rlbatch must know before anything runs. No torch is imported here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class NoOptions:
    """The options of an extension that takes none."""


@dataclass(frozen=True)
class Configurable:
    """An extension with options of its own: they become config keys under its group (``reward.options.my_option``; of estimators and losses
    ``algorithm.advantage_options.*`` and ``algorithm.loss_options.*``, of filters ``sampling.filter_options.<name>.*``). The types below
    also say what only one kind can.

    Attributes:
        build: Called once a rank with an instance of ``options`` (after the context, where the extension's factory takes one).
        options: A dataclass; every field has a default.
    """

    build: Callable[..., Any]
    options: type


def always(extension: Any) -> Callable[[Any], Any]:
    """A ``build`` function for an extension without options: it always returns ``extension``."""
    return lambda options: extension


Scope = Literal["group", "sample", "rank"]


def any_label(options: Any, label: Any) -> None:
    """Accepts every label: a reward's check unless it declares another."""


def whole_response(options: Any, sample: Any) -> str | None:
    """The whole response, stripped: the answer where a reward does not say which part of a response is it."""
    return str(sample.response.strip())


@dataclass(frozen=True)
class RewardSpec(Configurable):
    """A reward, and what it needs; ``RewardSpec(always(reward), scope="sample")`` if it has no options.

    Attributes:
        check_label: Given the options and a label: raises ``DataError`` if the reward cannot use it; see ``LabelChecker``.
        scope: What one call gets. ``group``: all samples of a prompt, in a worker process. ``sample``: a list of one sample, in a worker
            process, so that an error or a hang costs no other. ``rank``: all samples of the rank, once it has generated, in the rank
            itself: without a deadline, and not while others generate.
        is_light: Whether it takes no time, whatever a response holds: it is called as with ``rank``, unless it is part of another.
        parts: Given the options: other rewards that this one is made of, name of the part -> name and options of its reward. ``build`` then
            takes the options and name of the part -> reward. Their labels are checked, and they may not be ``rank``.
        unscored: What becomes of samples without a verdict if ``reward.on_timeout`` does not say it.
        timeout_s: Deadline of a call, seconds, or what gives it for the options, if ``reward.timeout_s`` does not say it. Of one that is
            made of others: the least.
        answer: Given the options and a sample: its final answer, or None; see ``AnswerReader``. By default the whole response.
        needs_label: Whether rows that it scores must have a label; of one that is made of others its parts say it.
    """

    options: type = NoOptions
    check_label: Callable[[Any, Any], None] = any_label
    scope: Scope = "group"
    is_light: bool = False
    parts: Callable[[Any], Mapping[str, tuple[str, Mapping[str, Any]]]] | None = None
    unscored: Literal["zero", "drop_group"] = "zero"
    timeout_s: float | Callable[[Any], float] = 60.0
    answer: Callable[[Any, Any], str | None] = whole_response
    needs_label: bool = True


@dataclass(frozen=True)
class AdvantageSpec(Configurable):
    """An advantage estimator, and what it needs; ``AdvantageSpec(always(estimator), min_group_size=2)`` if it has no options.

    Attributes:
        min_group_size: Least ``algorithm.group_size``: 2 of one that compares the samples of a prompt.
        needs_reference: Whether it reads ``AdvantageInputs.old_logprobs`` and ``ref_logprobs``: both then have a forward pass of their own.
    """

    options: type = NoOptions
    min_group_size: int = 1
    needs_reference: bool = False


@dataclass(frozen=True)
class LossSpec(Configurable):
    """A policy loss, and what it needs; ``LossSpec(always(loss), aggregations=("sequence_mean",))`` if it has no options.

    Attributes:
        aggregations: Values of ``algorithm.loss_aggregation`` that its definition allows, others are refused; empty: any.
        needs_reference: Whether it reads ``PolicyLossInputs.ref_logprobs``.
    """

    options: type = NoOptions
    aggregations: tuple[str, ...] = ()
    needs_reference: bool = False


@dataclass(frozen=True)
class FilterSpec(Configurable):
    """A group filter, and what it needs; ``FilterSpec(always(keeps), min_group_size=2)`` if it has no options.

    Attributes:
        min_group_size: Least ``algorithm.group_size``: 2 of one that compares the samples of a prompt.
    """

    options: type = NoOptions
    min_group_size: int = 1


@dataclass(frozen=True)
class TrackerSpec(Configurable):
    """A tracker, and what it needs; ``build`` is called with a ``TrackerContext`` and the options.

    Attributes:
        module: What it imports that may not be installed, e.g. ``wandb``: refused at submit where the ranks start on the same machine.
        in_step: Called by the step itself and not in a thread: only of one that writes a local file in no time.
    """

    options: type = NoOptions
    module: str = ""
    in_step: bool = False


@dataclass(frozen=True)
class OffloadMemory:
    """What an offload strategy does with the trainer's memory: what submit and the preflight count.

    Attributes:
        releases_gradients: Whether gradients have memory in updates only: not before the first, and not while an engine generates.
        hosted_share: Share of the parameters, in whole tensors, whose optimizer state is on the host, in all phases.
        hosted_bytes: Bytes of host memory for each of these.
        moves_state: Whether the other optimizer state leaves the accelerator while an engine generates, into host memory that is kept
            from then on.
        moves_weights: See ``OffloadStrategy.moves_weights``; the weights move into host memory that is kept from the start of engines on.
    """

    releases_gradients: bool = False
    hosted_share: float = 0.0
    hosted_bytes: float = 0.0
    moves_state: bool = False
    moves_weights: bool = False


@dataclass(frozen=True)
class OffloadSpec(Configurable):
    """An offload strategy, and what it does with memory.

    Attributes:
        needs_gpu: Refused at submit where the ranks would run on CPUs.
        memory: What it does with memory, given its options and ``train.precision``; may raise ``ConfigError``. None: not known, then all
            that it could move counts as nothing.
        advised: Options that the planner suggests where a job does not fit.
    """

    needs_gpu: bool = False
    memory: Callable[[Any, str], OffloadMemory] | None = None
    advised: Sequence[Mapping[str, Any]] = ({},)


@dataclass(frozen=True)
class EngineShape:
    """How an engine divides a model over its GPUs: what submit checks before anything starts.

    Attributes:
        replica_gpus: GPUs that hold one copy of all but the routed experts; they must be on one node.
        replicas: Copies. Routed experts are divided over all GPUs of the engine.
        memory_share: Share of each GPU's memory that the engine takes for weights and cache.
        context_tokens: Longest prompt and response together, with ``context_spare``; 0: not said.
        stages: Pipeline stages of a replica.
        separate_gpus: GPUs of each node that have no rank, but only engines; 0: engines are on the ranks' GPUs.
        asleep: Where the weights are while the trainer trains: on the ``gpu``, beside the cache, in ``host`` memory, or ``gone``.
        fills_share: Whether the cache takes all of ``memory_share`` that weights leave.
        offloaded_gib: GiB of the weights on each GPU that the engine keeps in host memory instead.
        value_bytes: Bytes of a weight that is not quantised; 0: as the trainer's.
        cached_bytes: Bytes of a number in the cache; 0: as ``value_bytes``.
        gone_options: Options below ``rollout.options`` and their values with which weights are ``gone``, on GPUs: on CPUs they stay.
        memory_option: Option below ``rollout.engine`` that says ``memory_share``; empty: none does.
        context_option: Option below ``rollout.engine`` that says ``context_tokens``.
        replicas_option: Option below ``rollout.engine`` that says ``replicas``.
        context_spare: How many of ``context_tokens`` the engine keeps for itself.
        is_share_of_free: Whether ``memory_share`` is one of what is free beside the trainer when the engine starts, not of all.
        samples_at_once: Most samples that a replica works on at once; 0: not said.
        cpu_head_sizes: Sizes of attention heads for which it has kernels on CPUs; empty: any. Latent attention has its own.
        is_eager: Whether its host starts each kernel, without CUDA graphs.
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
    gone_options: Mapping[str, Any] = field(default_factory=dict)
    memory_option: str = ""
    context_option: str = ""
    replicas_option: str = ""
    context_spare: int = 0
    is_share_of_free: bool = False
    samples_at_once: int = 0
    cpu_head_sizes: Sequence[int] = ()
    is_eager: bool = False

    @property
    def is_colocated(self) -> bool:
        """Whether the trainer is on the same GPUs."""
        return not self.separate_gpus


def no_draft(engine: Mapping[str, Any]) -> str | None:
    """Names no draft: an engine that speculates with no weights of its own."""
    return None


def any_engine(options: Any, engine: Mapping[str, Any]) -> None:
    """Accepts every machine: a backend whose engine needs nothing that one might lack."""


@dataclass(frozen=True)
class RolloutSpec(Configurable):
    """A rollout backend, and what submit must know of its engine.

    Attributes:
        needs_gpu: Refused at submit where the ranks would run on CPUs.
        gpu_options: Options that are refused there if they are set.
        has_engine: Whether it takes ``rollout.engine.*``.
        ranks_option: The option that says how many neighbouring ranks share an engine; empty: each has its own.
        separate_option: The option that says how many GPUs of each node have no rank, but only engines; empty: none.
        shortest_option: The option that says before which token of a response no stop token is sampled; empty: any may be one.
        over_nodes: The options in ``rollout.engine`` of an engine on so many nodes; on each the first of its ranks there generates. None:
            an engine's ranks must be on one node.
        engine_shape: How its engine divides the model, given its options and ``rollout.engine.*``; may raise ``ConfigError``. None: the
            ranks of an engine hold one copy.
        check_engine: Whether this machine has its engine, given the same; called at submit where ranks start on the same machine, and on
            each node before the model is built; raises ``ConfigError``.
        continues: Whether it takes ``Continued`` responses in the place of prompts, and seeds all samples by ``draw_key``; without that
            ``sampling.partial_tokens`` is refused.
        has_fp8: Whether its engine, on GPUs, takes weights that are quantised in blocks (``rollout.quantization``).
        returns_kept_tokens: Whether its samples say what each token was chosen from (``Completion.kept``); without that ``rollout.top_p``
            and ``rollout.top_k`` are refused.
        returns_routes: Whether its samples say which experts tokens went to (``Completion.routes``); without that
            ``algorithm.routing_replay=rollout`` is refused.
        starts_beside: Whether it is built before the trainer, with ``RolloutContext.starts_later``, and is a ``StartingBackend``.
        draft: Whose weights its engine speculates with, given ``rollout.engine.*``: a Hugging Face folder, empty for the layers that the
            model's family carries, None for none; may raise ``ConfigError``.
    """

    needs_gpu: bool = False
    gpu_options: Sequence[str] = ()
    has_engine: bool = False
    ranks_option: str = ""
    separate_option: str = ""
    shortest_option: str = ""
    over_nodes: Callable[[int], Mapping[str, Any]] | None = None
    engine_shape: Callable[[Any, Mapping[str, Any]], EngineShape] | None = None
    check_engine: Callable[[Any, Mapping[str, Any]], None] = any_engine
    continues: bool = False
    has_fp8: bool = False
    returns_kept_tokens: bool = False
    returns_routes: bool = False
    starts_beside: bool = False
    draft: Callable[[Mapping[str, Any]], str | None] = no_draft
