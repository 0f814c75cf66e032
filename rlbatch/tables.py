"""What hooks register: kinds of names, what each name stands for, and who supplied it."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast, get_args, get_type_hints

from rlbatch.api import (
    AdvantageSpec,
    AnswerReader,
    ConfigError,
    Configurable,
    FilterSpec,
    LabelChecker,
    LossSpec,
    NoOptions,
    OffloadSpec,
    PluginError,
    RewardSpec,
    RolloutSpec,
    Tracker,
    TrackerContext,
    TrackerSpec,
    always,
)
from rlbatch.api.declarations import Scope
from rlbatch.config.schema import AlgorithmConfig
from rlbatch.config.structured import closest, from_mapping, key_docs
from rlbatch.foreign_code import foreign_code

FILTERS, TRACKERS = "sampling.filters", "trackers"
SEVERAL = {FILTERS: "sampling.filter_options", TRACKERS: "tracker_options"}
"""Keys that choose several names, and the key below which the options of each are."""
AGGREGATIONS = get_args(get_type_hints(AlgorithmConfig)["loss_aggregation"])


@dataclass(frozen=True)
class Supplier:
    """Who registered something.

    Attributes:
        module: Module, or the path of a python file.
        distribution: Installed distribution; empty for ``plugins=[...]``.
        version: The distribution's version.
    """

    module: str
    distribution: str = ""
    version: str = ""


@dataclass(frozen=True)
class Registered:
    """A registered name.

    Attributes:
        name: What the config says.
        value: What the plugin returned for it, as the ``Spec`` of its kind.
        options: The options dataclass.
        supplier: Who registered it.
    """

    name: str
    value: Any
    options: type
    supplier: Supplier

    def parse(self, options: Mapping[str, Any], key: str) -> Any:
        """The options of what ``key`` chose as an instance of the options dataclass.

        Raises:
            ConfigError: an unknown option or a value of the wrong type.
        """
        try:
            return from_mapping(self.options, options, f"{options_key(key, self.name)}.")
        except (ValueError, TypeError) as error:  # of its __post_init__
            raise ConfigError(f"{options_key(key, self.name)} of {how_chosen(key, self.name)}: {error}. Correct them.") from error


class Table(Mapping[str, Registered]):
    """Names of one kind. Looking up an unknown name explains what there is."""

    def __init__(self, key: str, entries: Mapping[str, Registered]) -> None:
        self.key = key
        self._entries = dict(entries)

    def __getitem__(self, name: str) -> Registered:
        """The entry of a name, as ``named``."""
        return self.named(name, self.key)

    def named(self, name: str, key: str) -> Registered:
        """The entry of a name that ``key`` chose.

        Raises:
            PluginError: the name is unknown; lists what exists and who supplied it.
        """
        if name in self._entries:
            return self._entries[name]
        meant = " or ".join(self._described(close) for close in closest(name, self._entries))
        known = ", ".join(self._described(known) for known in sorted(self._entries)) or "nothing"
        raise PluginError(f"{how_chosen(key, name)}: unknown. {f'Did you mean {meant}? ' if meant else ''}Known: {known}.")

    def built(self, name: str, options: Mapping[str, Any], argument: str, *more: Any) -> Any:
        """Calls a name's ``build`` with its options and ``more``; the result must be a function of one argument.

        Raises:
            PluginError: what builds it raised, or returned no function.
        """
        entry, what = self[name], how_chosen(self.key, name)
        parsed = entry.parse(options, self.key)
        with foreign_code(what, "its build"):
            function = entry.value.build(parsed, *more)
        check_callable(f"{what}: what its build returns", function, (argument,), may_wait=isinstance(entry.value, RewardSpec))
        return function

    def __iter__(self) -> Iterator[str]:
        """The names."""
        return iter(self._entries)

    def __len__(self) -> int:
        """How many names."""
        return len(self._entries)

    def __contains__(self, name: object) -> bool:
        """Whether a name is registered; Mapping's own would see PluginError instead of KeyError."""
        return name in self._entries

    def _described(self, name: str) -> str:
        return f"`{name}` ({self._entries[name].supplier.module})"


def how_chosen(key: str, name: str) -> str:
    """The text by which a name is chosen, as one types it."""
    return f"{key}=[{name}]" if key in SEVERAL else f"{key}={name}"


def options_key(key: str, name: str) -> str:
    """The key of the options of a name that a key chooses: ``reward.options``, ``algorithm.loss_options``; of one among several its own."""
    if key in SEVERAL:
        return f"{SEVERAL[key]}.{name}"
    return f"{key}_options" if "." in key else f"{key}.options"


@dataclass(frozen=True)
class Kind:
    """The kind of names that a hook registers.

    Attributes:
        key: The config key that chooses among its names.
        called: What a registered function is called with.
        built: What the ``build`` of a ``Configurable`` is called with.
        spec: What each name stands for in its table, made of whatever was registered.
        build: Makes a ``build`` of a function.
    """

    key: str
    called: tuple[str, ...]
    built: tuple[str, ...]
    spec: type
    build: Callable[[Any], Callable[..., Any]] = always


def _of_reward(reward: Any) -> Mapping[str, Any]:
    """The fields of ``RewardSpec`` that a reward without options has as methods."""
    said: dict[str, Any] = {}
    if isinstance(reward, LabelChecker):
        check = reward.check_label
        said["check_label"] = lambda options, label: check(label)
    if isinstance(reward, AnswerReader):
        answer = reward.answer
        said["answer"] = lambda options, sample: answer(sample)
    return said


def _in_context(factory: Callable[[Any], Any]) -> Callable[..., Any]:
    return lambda context, options: factory(context)


KINDS: Mapping[str, Kind] = {
    "rlbatch_register_rollout_backends": Kind("rollout", ("context",), ("context", "options"), RolloutSpec, _in_context),
    "rlbatch_register_rewards": Kind("reward", ("samples",), ("options",), RewardSpec),
    "rlbatch_register_advantage_estimators": Kind("algorithm.advantage", ("inputs",), ("options",), AdvantageSpec),
    "rlbatch_register_policy_losses": Kind("algorithm.loss", ("inputs",), ("options",), LossSpec),
    "rlbatch_register_offload_strategies": Kind("offload", (), ("options",), OffloadSpec, lambda factory: lambda options: factory()),
    "rlbatch_register_group_filters": Kind(FILTERS, ("group",), ("options",), FilterSpec),
    "rlbatch_register_trackers": Kind(TRACKERS, ("context",), ("context", "options"), TrackerSpec, _in_context),
}
"""Kinds of plugins, by hook."""


def spec_of(what: str, value: Any, kind: Kind) -> Any:
    """What a name stands for in its table: ``value``, which was registered by a hook of this kind.

    Raises:
        PluginError: it cannot be used as what it was registered for.
    """
    if not isinstance(value, Configurable):
        check_callable(what, value, kind.called, may_wait=kind.spec is RewardSpec)
        return kind.spec(kind.build(value), NoOptions, **(_of_reward(value) if kind.spec is RewardSpec else {}))
    if type(value) is Configurable:
        value = kind.spec(value.build, value.options)
    if not isinstance(value, kind.spec):
        raise PluginError(f"{what} is {_article(type(value))}. Register a function or {_article(kind.spec)}.")
    assert isinstance(value, Configurable)
    if not dataclasses.is_dataclass(value.options):
        raise PluginError(f"{what}: options must be a dataclass. Decorate it with @dataclass(frozen=True).")
    try:
        list(key_docs(value.options))
    except Exception as error:  # foreign code: its annotations may name anything
        raise PluginError(f"{what}: the types of its options cannot be read ({type(error).__name__}: {error}). Correct them.") from error
    fields = {field.name: field for field in dataclasses.fields(value.options)}
    required = [name for name, field in fields.items() if field.default is field.default_factory is dataclasses.MISSING]
    if required:
        raise PluginError(f"{what}: the option `{required[0]}` has no default. Give it one.")
    if isinstance(value, RolloutSpec):
        for said in ("ranks_option", "separate_option", "shortest_option"):
            if (name := getattr(value, said)) and name not in fields:
                raise PluginError(f"{what}: {said}={name} is none of its options. Correct it.")
    if isinstance(value, LossSpec) and set(value.aggregations) - set(AGGREGATIONS):
        raise PluginError(f"{what}: aggregations={value.aggregations!r}: must be a tuple of {', '.join(AGGREGATIONS)}. Correct it.")
    has_parts = isinstance(value, RewardSpec) and value.parts is not None
    check_callable(f"{what}: its build", value.build, (*kind.built, "rewards") if has_parts else kind.built)
    if isinstance(value, RewardSpec) and (value.scope not in get_args(Scope) or value.unscored not in ("zero", "drop_group")):
        raise PluginError(f"{what}: scope={value.scope!r}, unscored={value.unscored!r}: there is no such. See docs/use/reward.md.")
    return value


def _article(kind: type) -> str:
    return f"{'an' if kind.__name__[0] in 'AO' else 'a'} {kind.__name__}"


def check_callable(what: str, value: Any, arguments: Sequence[str], *, may_wait: bool = False) -> None:
    """Refuses what cannot be called as it will be; functions in C may not say what they take.

    Args:
        what: The plugin and the name that it registered.
        value: What was registered.
        arguments: What it will be called with, in order.
        may_wait: Whether it may be an ``async def``.

    Raises:
        PluginError: it is no function, one of other arguments, or an ``async def`` that nobody awaits.
    """
    if not callable(value):
        raise PluginError(f"{what} must be callable, is {type(value).__name__}. Correct it.")
    if not may_wait and (inspect.iscoroutinefunction(value) or inspect.iscoroutinefunction(type(value).__call__)):
        raise PluginError(f"{what} must not be an `async def`: nobody awaits it. Make it a `def` that calls asyncio.run.")
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*arguments)
    except TypeError:
        plain = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()]
        taken = inspect.Signature(plain)
        raise PluginError(
            f"{what} must take ({', '.join(arguments)}), takes {taken}. Correct it; docs/use/plugins.md has examples."
        ) from None


@dataclass(frozen=True)
class ChosenTracker:
    """A tracker of this run.

    Attributes:
        name: Its name in ``trackers``.
        spec: What it was registered as.
        options: An instance of its options.
    """

    name: str
    spec: TrackerSpec
    options: Any

    def open(self, context: TrackerContext) -> Tracker:
        """Opens the tracker; raises whatever the plugin raises."""
        return cast(Tracker, self.spec.build(context, self.options))
