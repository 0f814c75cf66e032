"""The hooks. A plugin implements any of them with ``@rlbatch.api.hookimpl``; each is called once, at start, never per token.

Modules with hook implementations are imported on the login node too, where there is no torch: import it inside functions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pluggy

from rlbatch.api.declarations import Configurable
from rlbatch.api.mapping import ModelFamily
from rlbatch.api.protocols import (
    AdvantageEstimator,
    GroupFilter,
    OffloadStrategyFactory,
    PolicyLoss,
    Reward,
    RolloutBackendFactory,
    TrackerFactory,
)

PROJECT = "rlbatch"
API_VERSION = 2

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def rlbatch_register_rollout_backends() -> Mapping[str, RolloutBackendFactory | Configurable]:
    """Engines that generate, by name: ``rollout=<name>``.

    Called: on the login node and on every rank, at start. Collectives: not allowed.
    The factory is called on every rank that hosts an engine, with a ``RolloutContext`` (then the options, if it is ``Configurable``). A
    ``RolloutSpec`` says what submit must know of its engine.

    Returns:
        Name -> factory of a ``RolloutBackend``.

    Example::

        @hookimpl
        def rlbatch_register_rollout_backends():
            return {"my_engine": build_my_engine}
    """


@hookspec(firstresult=True)
def rlbatch_resolve_model_family(hf_config: Mapping[str, Any]) -> ModelFamily | None:
    """The family of a Hugging Face config, or None if it is not yours. Third-party plugins are asked before the built-ins.

    Called: on the login node and on every rank, at start. Collectives: not allowed.

    Args:
        hf_config: The parsed config.json.

    Returns:
        A ``ModelFamily``, resolved for this config.

    Raises:
        ModelError: the config has a field that changes the arithmetic and that the family does not implement.

    Example::

        @hookimpl
        def rlbatch_resolve_model_family(hf_config):
            return llama(hf_config) if hf_config["model_type"] == "llama" else None
    """


@hookspec
def rlbatch_register_advantage_estimators() -> Mapping[str, AdvantageEstimator | Configurable]:
    """Advantage estimators, by name: ``algorithm.advantage=<name>``.

    Called: on the login node and on every rank, at start. Collectives: not allowed.
    The estimator runs on every rank alike, on all samples of the step (``AdvantageInputs``).

    Returns:
        Name -> function of ``AdvantageInputs`` to a tensor [N] or [T], or a ``Configurable`` whose ``build`` makes one of its options. An
        ``AdvantageSpec`` also says that it needs groups of more than one sample, or the reference model.

    Example::

        @hookimpl
        def rlbatch_register_advantage_estimators():
            return {"reward_itself": lambda inputs: inputs.rewards}
    """


@hookspec
def rlbatch_register_policy_losses() -> Mapping[str, PolicyLoss | Configurable]:
    """Policy losses, by name: ``algorithm.loss=<name>``.

    Called: on the login node and on every rank, at start. Collectives: not allowed.
    The loss runs on the ranks of the last pipeline stage, for every pack (``PolicyLossInputs``).

    Returns:
        Name -> function of ``PolicyLossInputs`` to ``PolicyLossOutputs``, or a ``Configurable`` whose ``build`` makes one of its options. A
        ``LossSpec`` also says which aggregations its definition allows, and that it needs the reference model.

    Example::

        @hookimpl
        def rlbatch_register_policy_losses():
            return {"reinforce": reinforce}
    """


@hookspec
def rlbatch_register_offload_strategies() -> Mapping[str, OffloadStrategyFactory | Configurable]:
    """Offload strategies, by name: ``offload=<name>``.

    Called: on the login node and on every rank, at start. Collectives: not allowed.
    The factory is called once on every rank, without arguments (or with the options, if it is ``Configurable``). An
    ``OffloadSpec`` says what it does with memory.

    Returns:
        Name -> factory of an ``OffloadStrategy``.

    Example::

        @hookimpl
        def rlbatch_register_offload_strategies():
            return {"mine": MyStrategy}
    """


@hookspec
def rlbatch_register_rewards() -> Mapping[str, Reward | Configurable]:
    """Rewards, by name: ``reward=<name>``, or a prompt row's ``reward`` field.

    Called: on the login node and on every rank, at start. Collectives: not allowed.
    The reward runs on the ranks that generate, on the samples of whole groups; it returns one finite float a sample, in order.

    Returns:
        Name -> function of a list of ``Sample`` to a list of floats.

    Example::

        @hookimpl
        def rlbatch_register_rewards():
            return {"short": lambda samples: [1.0 / s.response_length for s in samples]}
    """


@hookspec
def rlbatch_register_group_filters() -> Mapping[str, GroupFilter | Configurable]:
    """Filters of sample groups, by name: ``sampling.filters=[<name>]``.

    Called: on the login node and on every rank, at start. Collectives: not allowed.
    The filter runs on the rank that generated a group, once it is scored. Groups that it refuses are not trained on.

    Returns:
        Name -> function of a ``SampleGroup`` to True (keep it) or False, or a ``Configurable`` whose ``build`` makes one of its options. A
        ``FilterSpec`` also says that it needs groups of more than one sample.

    Example::

        @hookimpl
        def rlbatch_register_group_filters():
            return {"short": lambda group: max(s.response_length for s in group.samples) < 100}
    """


@hookspec
def rlbatch_register_trackers() -> Mapping[str, TrackerFactory | Configurable]:
    """Trackers, by name: ``trackers=[<name>,...]``; the options of each are ``tracker_options.<name>.*``.

    Called: on the login node and on every rank, at start. Collectives: not allowed.
    The factory is called on rank 0 only, with a ``TrackerContext`` (then the options, if it is ``Configurable``). A ``TrackerSpec`` also
    says what must be installed.

    Returns:
        Name -> factory of a ``Tracker``.

    Example::

        @hookimpl
        def rlbatch_register_trackers():
            return {"mine": MyTracker}
    """
