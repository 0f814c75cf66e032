"""Refuses keys that contradict what the chosen plugins say of themselves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlbatch.api import ConfigError
from rlbatch.config.schema import AlgorithmConfig, Config, RolloutConfig
from rlbatch.config.structured import show_value


def check_plugins(
    config: Config, rollouts: Mapping[str, Any], advantages: Mapping[str, Any], losses: Mapping[str, Any], filters: Mapping[str, Any]
) -> None:
    """Checks what a config chooses.

    Args:
        config: The job's config.
        rollouts: Registered backends by name: entries whose ``value`` is a ``RolloutSpec``. An unknown name raises there, as in the others.
        advantages: The same of estimators, with ``AdvantageSpec``.
        losses: The same of losses, with ``LossSpec``.
        filters: The same of filters, with ``FilterSpec``.

    Raises:
        PluginError: an unknown name.
        ConfigError: the first contradiction found.
    """
    _check_group_size(config.algorithm, advantages)
    _check_aggregation(config.algorithm, losses)
    _check_kept_tokens(config.rollout, rollouts)
    _check_routes(config, rollouts)
    _check_filters(config, filters)
    _check_partial(config, rollouts, advantages)


def _check_group_size(algorithm: AlgorithmConfig, advantages: Mapping[str, Any]) -> None:
    least, size = advantages[algorithm.advantage].value.min_group_size, algorithm.group_size
    if size < least:
        others = "".join(
            f", or algorithm.advantage={other.name}"
            for other in advantages.values()
            if other.value.min_group_size <= size and not other.value.needs_reference
        )
        raise ConfigError(
            f"algorithm.group_size={size}: algorithm.advantage={algorithm.advantage} compares the samples of a prompt, "
            f"so it needs at least {least}. Use e.g. {max(8, least)}{others}."
        )


def _check_aggregation(algorithm: AlgorithmConfig, losses: Mapping[str, Any]) -> None:
    allowed = losses[algorithm.loss].value.aggregations
    if allowed and algorithm.loss_aggregation not in allowed:
        raise ConfigError(
            f"algorithm.loss_aggregation={algorithm.loss_aggregation}: algorithm.loss={algorithm.loss} has one value for a whole "
            f"response, so only {' or '.join(allowed)} is what it is defined by. Use algorithm.loss_aggregation={allowed[0]}."
        )


def _check_kept_tokens(rollout: RolloutConfig, rollouts: Mapping[str, Any]) -> None:
    said = f"top_p={rollout.top_p:g}" if rollout.top_p < 1 else f"top_k={rollout.top_k}" if rollout.top_k else ""
    if said and not rollouts[rollout.name].value.returns_kept_tokens:
        others = "".join(f", or rollout={entry.name}" for entry in rollouts.values() if entry.value.returns_kept_tokens)
        raise ConfigError(
            f"rollout.{said}: rollout={rollout.name} does not say which tokens each one was chosen from, and the trainer's log-probs "
            f"must be of the same. Use rollout.top_p=1 rollout.top_k=0{others}."
        )


def _check_routes(config: Config, rollouts: Mapping[str, Any]) -> None:
    rollout = config.rollout.name
    if config.algorithm.routing_replay == "rollout" and not rollouts[rollout].value.returns_routes:
        others = "".join(f", or rollout={entry.name}" for entry in rollouts.values() if entry.value.returns_routes)
        raise ConfigError(
            f"algorithm.routing_replay=rollout: rollout={rollout} does not say which experts its tokens went to. "
            f"Use algorithm.routing_replay=none{others}."
        )


def _check_filters(config: Config, filters: Mapping[str, Any]) -> None:
    names, size = config.sampling.filters, config.algorithm.group_size
    for name in names:
        least = filters[name].value.min_group_size
        if size < least:
            raise ConfigError(
                f"algorithm.group_size={size}: sampling.filters=[{name}] compares the samples of a prompt, so it needs at least {least}. "
                f"Use e.g. {max(8, least)}, or leave the filter out."
            )
    if len(set(names)) < len(names):
        once = show_value([*dict.fromkeys(names)])
        raise ConfigError(f"sampling.filters={show_value(names)}: must name each filter once. Use sampling.filters={once}.")
    for name, options in config.sampling.filter_options.items():
        if name not in names:
            fix = f"Set sampling.filters={show_value([*names, filters[name].name])}, or leave this key out."
            raise ConfigError(f"sampling.filter_options.{name}: has an effect only with that filter. {fix}")
        if not isinstance(options, Mapping):
            raise ConfigError(
                f"sampling.filter_options.{name}={show_value(options)}: is a group of keys. "
                f"Set sampling.filter_options.{name}.<option>=<value>."
            )


def _check_partial(config: Config, rollouts: Mapping[str, Any], advantages: Mapping[str, Any]) -> None:
    sampling, rollout = config.sampling, config.rollout
    if not sampling.partial_tokens:
        return
    spec = rollouts[rollout.name].value
    if not spec.continues:
        others = " or ".join(f"rollout={name}" for name, entry in rollouts.items() if entry.value.continues)
        raise ConfigError(
            f"sampling.partial_tokens={sampling.partial_tokens}: rollout={rollout.name} does not say that it can go on with responses "
            f"(RolloutSpec.continues). Use {others}, or sampling.partial_tokens=0."
        )
    shortest = rollout.options.get(spec.shortest_option, 0) if spec.shortest_option else 0
    if shortest:
        raise ConfigError(
            f"rollout.options.{spec.shortest_option}={shortest}: is counted in each part of a response, which "
            f"sampling.partial_tokens={sampling.partial_tokens} cuts them into. Leave one of both out."
        )
    if sampling.old_tokens == "mask" and advantages[config.algorithm.advantage].value.needs_reference:
        raise ConfigError(
            f"algorithm.advantage={config.algorithm.advantage}: needs the log-probs of all tokens, and sampling.old_tokens=mask leaves "
            "some out. Use sampling.old_tokens=keep."
        )
