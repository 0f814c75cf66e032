"""The plugins of a job: found by entry point, checked, and sorted into tables of names.

Built-ins register first: pluggy asks the last registered first, so a third party wins where one answer counts.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from importlib import metadata
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import pluggy

from rlbatch import reward_parts
from rlbatch.api import (
    API_VERSION,
    AdvantageEstimator,
    ConfigError,
    EngineShape,
    GroupFilter,
    ModelError,
    ModelFamily,
    NoOptions,
    OffloadMemory,
    OffloadSpec,
    OffloadStrategy,
    PluginError,
    PolicyLoss,
    Reward,
    RlbatchError,
    RolloutBackend,
    RolloutContext,
    RolloutSpec,
    hookspecs,
)
from rlbatch.config.check import check_engines
from rlbatch.config.check_plugins import check_plugins
from rlbatch.config.compose import compose
from rlbatch.config.paths import absolute, files_there, here, paths_of, with_absolute_paths, with_paths_there
from rlbatch.config.schema import AlgorithmConfig, Config, RewardConfig
from rlbatch.config.structured import key_docs, show_value, to_plain
from rlbatch.foreign_code import error_text, foreign_code, state_kept
from rlbatch.plugin_files import load_plugin_file
from rlbatch.tables import KINDS, ChosenTracker, Kind, Registered, Supplier, Table, options_key, spec_of

ENTRY_POINT_GROUP = "rlbatch"
DISTRIBUTION = "rlbatch"
PYTHON = "python"
"""Key of ``rollout.engine``: its interpreter, in a container one of the image."""


class Registry:
    """The names that the plugins offer, and what each stands for.

    Attributes:
        tables: All tables, name -> entry.
        rollouts, rewards, advantages, losses, offloads, filters, trackers: Each of them.
        suppliers: Everything that was loaded, in order.
    """

    def __init__(self, manager: pluggy.PluginManager, suppliers: Mapping[str, Supplier]) -> None:
        """Asks every plugin for its names."""
        self._manager = manager
        self._suppliers = suppliers
        self.tables = tuple(Table(kind.key, self._entries(hook, kind)) for hook, kind in KINDS.items())
        self.rollouts, self.rewards, self.advantages, self.losses, self.offloads, self.filters, self.trackers = self.tables

    @property
    def model_families(self) -> tuple[Supplier, ...]:
        """Plugins that claim Hugging Face configs, in the order in which they are asked."""
        impls = self._manager.hook.rlbatch_resolve_model_family.get_hookimpls()
        return tuple(self._suppliers[impl.plugin_name] for impl in reversed(impls))

    def resolve_model_family(self, hf_config: Mapping[str, Any]) -> ModelFamily:
        """The family of a Hugging Face config.json.

        Raises:
            ModelError: no plugin claims it, or its family refuses a field.
        """
        family = self._manager.hook.rlbatch_resolve_model_family(hf_config=hf_config)
        if family is None and "model_type" not in hf_config:
            raise ModelError(
                "config.json model_type: is missing, and says which family the model is of. Add it, or download the folder again."
            )
        if family is None:
            asked = ", ".join(supplier.module for supplier in self.model_families) or "nobody"
            raise ModelError(
                f"model.hf: no plugin claims model_type `{hf_config.get('model_type')}`. {self._built_as(hf_config)}Asked: {asked}. Use a "
                "model of one of these families, or add yours, a plugin as examples/rlbatch-llama is (docs/use/model_families.md)."
            )
        if not isinstance(family, ModelFamily):
            raise PluginError(
                f"rlbatch_resolve_model_family: must return a ModelFamily or None, returned {type(family).__name__}. Correct it."
            )
        left_out = (hf_config.get("quantization_config") or {}).get("modules_to_not_convert") or ()
        return dataclasses.replace(family, unquantised=family.unquantised | frozenset(left_out))

    def complete(self, config: Config) -> Config:
        """Checks the plugin names of a config, fills in the defaults of their options and makes their paths absolute.

        Raises:
            PluginError: an unknown name.
            ConfigError: an unknown option or a value of the wrong type, or samples that an estimator cannot compare.
        """
        self.ranks_per_engine(config)
        check_plugins(config, self.rollouts, self.advantages, self.losses, self.filters)
        rollout, algorithm, sampling = config.rollout, config.algorithm, config.sampling
        for name, one in config.data.sets.items():
            _completed(self.rewards, one.reward or "", {}, f"data.sets.{name}.reward")
        sets = {
            name: dataclasses.replace(
                each, reward_options=_completed(self.rewards, each.reward, each.reward_options, f"eval.sets.{name}.reward")
            )
            for name, each in config.eval.sets.items()
        }
        return dataclasses.replace(
            config,
            eval=dataclasses.replace(config.eval, sets=sets),
            rollout=dataclasses.replace(
                rollout, options=_completed(self.rollouts, rollout.name, rollout.options), engine=self._engine_with_paths(config)
            ),
            reward=dataclasses.replace(config.reward, options=_completed(self.rewards, config.reward.name, config.reward.options)),
            offload=dataclasses.replace(config.offload, options=_completed(self.offloads, config.offload.name, config.offload.options)),
            algorithm=dataclasses.replace(
                algorithm,
                advantage_options=_completed(self.advantages, algorithm.advantage, algorithm.advantage_options),
                loss_options=_completed(self.losses, algorithm.loss, algorithm.loss_options),
            ),
            sampling=dataclasses.replace(
                sampling,
                filter_options={name: _completed(self.filters, name, options) for name, options in _filters(config)},
            ),
            tracker_options=self._tracker_options(config),
        )

    def _tracker_options(self, config: Config) -> Mapping[str, Mapping[str, Any]]:
        names, chosen = config.trackers, f"trackers=[{','.join(config.trackers)}]"
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"{chosen}: has {name} {names.count(name)} times. Leave one out.")
        for name, options in config.tracker_options.items():
            if self.trackers[name].name not in names:
                raise ConfigError(f"tracker_options.{name}: {name} is not among {chosen}. Add it there, or leave its options out.")
            if not isinstance(options, Mapping):
                raise ConfigError(f"tracker_options.{name}={options}: is a group of keys. Set tracker_options.{name}.<option>=<value>.")
        return {name: _completed(self.trackers, name, config.tracker_options.get(name, {})) for name in names}

    def text_options(self, config: Config) -> frozenset[str]:
        """Keys of the chosen plugins' options that are text."""
        types = ((options_key(key, name), table[name].options) for key, table, name, _ in self._chosen(config) if name in table)
        docs = chain.from_iterable(key_docs(options, f"{key}.") for key, options in types)
        return frozenset(doc.name for doc in docs if doc.is_text)

    def paths_for_ranks(self, config: Config) -> Iterator[tuple[str, str]]:
        """Key and path of all files and folders that ranks read or write, beside the run folder."""
        chosen = [(options_key(key, name), table[name].parse(options, key), options) for key, table, name, options in self._chosen(config)]
        typed = (paths_of(parsed, f"{key}.") for key, parsed, _ in chosen)
        yield from ((key, path) for key, path, rule in chain(paths_of(config), *typed) if rule.is_for_ranks)
        for key, _, options in chosen:
            yield from files_there(options, key)
        yield from files_there({**config.rollout.engine, PYTHON: ""}, "rollout.engine")
        if draft := self.draft(config):
            yield "rollout.engine", draft
        if folder := module_folder(config.plugins):
            yield "plugins", folder

    def _chosen(self, config: Config) -> Iterator[tuple[str, Table, str, Mapping[str, Any]]]:
        """Each key with its table, the name that it chooses and the options; without a reward that is still to be named."""
        algorithm = config.algorithm
        for table in (self.rollouts, self.rewards, self.offloads):
            if (choice := getattr(config, table.key)).name:
                yield table.key, table, choice.name, choice.options
        yield self.advantages.key, self.advantages, algorithm.advantage, algorithm.advantage_options
        yield self.losses.key, self.losses, algorithm.loss, algorithm.loss_options
        for name, options in _filters(config):
            yield self.filters.key, self.filters, name, options
        for name, each in config.eval.sets.items():
            if each.reward:
                yield f"eval.sets.{name}.reward", self.rewards, each.reward, each.reward_options
        yield from ((self.trackers.key, self.trackers, name, config.tracker_options.get(name, {})) for name in config.trackers)

    def _engine_with_paths(self, config: Config) -> Mapping[str, Any]:
        """The engine's options. Its interpreter is a path if it looks like one: others are found by ``PATH``."""
        engine, known = config.rollout.engine, ""
        with suppress(ConfigError):  # told by a check
            known = self.draft(config) or ""
        python = engine.get(PYTHON)
        own = {PYTHON: absolute(python) if os.sep in python else python} if isinstance(python, str) else {}
        return {**with_paths_there(engine, (known,)), **own}

    def build_advantage(self, algorithm: AlgorithmConfig) -> AdvantageEstimator:
        """The advantage estimator, ready to be called; raises as ``build_reward``."""
        return cast(AdvantageEstimator, self.advantages.built(algorithm.advantage, algorithm.advantage_options, "inputs"))

    def build_loss(self, algorithm: AlgorithmConfig) -> PolicyLoss:
        """The policy loss, ready to be called; raises as ``build_reward``."""
        return cast(PolicyLoss, self.losses.built(algorithm.loss, algorithm.loss_options, "inputs"))

    def build_reward(self, name: str, options: Mapping[str, Any]) -> Reward:
        """A reward, ready to be called.

        Raises:
            PluginError: what builds it raised, or returned no function.
        """
        return reward_parts.build(self.rewards, name, options)

    def build_filters(self, config: Config) -> dict[str, GroupFilter]:
        """The group filters in order, ready to be called; raises as ``build_reward``."""
        return {name: cast(GroupFilter, self.filters.built(name, options, "group")) for name, options in _filters(config)}

    def needs_reference(self, algorithm: AlgorithmConfig) -> bool:
        """Whether log-probs of the reference model are computed."""
        specs = self.advantages[algorithm.advantage].value, self.losses[algorithm.loss].value
        return algorithm.kl_loss or algorithm.kl_reward_coef != 0 or any(spec.needs_reference for spec in specs)

    def check_builds(self, config: Config) -> None:
        """Builds what is built from options alone, as each rank will: what it refuses is told before anything starts.

        What it cannot import or open here may be there on the nodes, and is left to them.

        Raises:
            RlbatchError: what ``build`` raised, with the key.
        """
        algorithm, reward, offload = config.algorithm, config.reward, config.offload
        builds: list[Callable[[], Any]] = [
            lambda: self.build_offload(offload.name, offload.options),
            lambda: self.build_advantage(algorithm),
            lambda: self.build_loss(algorithm),
            lambda: self.build_filters(config),
        ]
        rewards = [reward, *(RewardConfig(each.reward, options=each.reward_options) for each in config.eval.sets.values())]
        builds += [partial(self.build_reward, each.name, each.options) for each in rewards if each.name]
        for build in builds:
            try:
                build()
            except RlbatchError as error:
                if not isinstance(error.__cause__, (ImportError, OSError)):
                    raise

    def build_rollout(self, name: str, options: Mapping[str, Any], context: RolloutContext) -> RolloutBackend:
        """An engine on this rank."""
        entry = self.rollouts[name]
        with state_kept(f"rollout={name}"):
            return cast(RolloutBackend, entry.value.build(context, entry.parse(options, "rollout")))

    def rollout(self, config: Config) -> RolloutSpec:
        """What the chosen rollout backend says of itself."""
        return cast(RolloutSpec, self.rollouts[config.rollout.name].value)

    def rollout_number(self, config: Config, option: str) -> int:
        """The value of an option of the chosen rollout backend; 0 for an option that it does not have, whose name is empty."""
        return int(getattr(self._rollout_options(config), option)) if option else 0

    def ranks_per_engine(self, config: Config) -> int:
        """How many ranks share an engine, as the rollout's options say; see ``check_engines``."""
        spec = self.rollout(config)
        return check_engines(config, self.rollout_number(config, spec.ranks_option) if spec.ranks_option else 1, spec)

    def separate_gpus(self, config: Config) -> int:
        """GPUs of each node that have no rank, but only engines."""
        return self.rollout_number(config, self.rollout(config).separate_option)

    def draft(self, config: Config) -> str | None:
        """Tells whose weights an engine speculates with (see ``RolloutSpec``); raises ConfigError for options that do not say it."""
        return self.rollout(config).draft(config.rollout.engine)

    def engine_shape(self, config: Config) -> EngineShape:
        """How an engine divides the model over its GPUs; raises ConfigError for options that contradict each other."""
        shape = self.rollout(config).engine_shape
        if shape is None:
            return EngineShape(self.ranks_per_engine(config))
        return shape(self._rollout_options(config), config.rollout.engine)

    def check_engine(self, config: Config) -> None:
        """Refuses engines that this machine does not have, with ConfigError."""
        self.rollout(config).check_engine(self._rollout_options(config), config.rollout.engine)

    def _rollout_options(self, config: Config) -> Any:
        return self.rollouts[config.rollout.name].parse(config.rollout.options, "rollout")

    def build_offload(self, name: str, options: Mapping[str, Any]) -> OffloadStrategy:
        """This rank's offload strategy."""
        entry = self.offloads[name]
        parsed = entry.parse(options, "offload")
        with foreign_code(f"offload={name}", "its build"):
            return cast(OffloadStrategy, entry.value.build(parsed))

    def chosen_trackers(self, config: Config) -> list[ChosenTracker]:
        """The run's trackers, none of which is open yet."""
        entries = [(self.trackers[name], config.tracker_options.get(name, {})) for name in config.trackers]
        return [ChosenTracker(entry.name, entry.value, entry.parse(options, self.trackers.key)) for entry, options in entries]

    def offload_memory(self, config: Config) -> OffloadMemory | None:
        """What the offload strategy does with memory; None: it does not say.

        Raises:
            ConfigError: options that cannot be, or not with this precision.
        """
        entry = self.offloads[config.offload.name]
        spec = cast(OffloadSpec, entry.value)
        return spec.memory and spec.memory(entry.parse(config.offload.options, "offload"), config.train.precision)

    def check_hardware(self, config: Config, *, on_gpu: bool) -> None:
        """Refuses plugins that cannot run on this hardware, with ConfigError."""
        for key, entry in (("offload", self.offloads[config.offload.name]), ("rollout", self.rollouts[config.rollout.name])):
            if not on_gpu and entry.value.needs_gpu:
                raise ConfigError(
                    f"{key}={entry.name}: needs GPUs, the ranks would run on CPUs here. Choose another {key}, or a GPU machine."
                )
        options = self._rollout_options(config)
        for option in self.rollout(config).gpu_options:
            if not on_gpu and (value := getattr(options, option)):
                raise ConfigError(
                    f"rollout.options.{option}={show_value(value)}: rollout={config.rollout.name} has it on GPUs alone, and the ranks "
                    "would run on CPUs here. Leave it out."
                )

    def _built_as(self, hf_config: Mapping[str, Any]) -> str:
        """A hint for a config.json whose ``architectures`` belong to a known model_type, as Kimi-K2's are DeepSeek-V3's; else empty."""
        named = hf_config.get("architectures")
        for name in map(str, named) if isinstance(named, list) else ():
            known = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.removesuffix("ForCausalLM")).lower()
            with suppress(RlbatchError):
                if self._manager.hook.rlbatch_resolve_model_family(hf_config={**hf_config, "model_type": known}) is not None:
                    return f"Its architecture is {name}: with model_type `{known}` in its config.json it is taken for that. "
        return ""

    def _entries(self, hook: str, kind: Kind) -> dict[str, Registered]:
        entries: dict[str, Registered] = {}
        for impl in getattr(self._manager.hook, hook).get_hookimpls():
            supplier = self._suppliers[impl.plugin_name]
            for name, value in _registered(impl.function, hook, supplier).items():
                spec = spec_of(f"plugin {supplier.module}: `{name}` of {hook}", value, kind)
                entry = Registered(name, spec, getattr(spec, "options", NoOptions), supplier)
                if name in entries:
                    raise PluginError(
                        f"{kind.key}={name}: registered twice, by {entries[name].supplier.module} and {supplier.module}. "
                        "Rename one, or uninstall one of the two."
                    )
                entries[name] = entry
        return entries


def load_plugins(extra: Sequence[str] = ()) -> Registry:
    """Imports and registers every plugin: the built-ins, other distributions', then ``extra`` (the config's ``plugins``).

    Raises:
        PluginError: a plugin that does not import, does not fit the API, or clashes with another.
    """
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    suppliers: dict[str, Supplier] = {}
    for module, supplier in [*_installed(), *(_extra(name) for name in extra)]:
        if not manager.is_registered(module):
            _register(manager, module, supplier)
            suppliers[supplier.module] = supplier
    return Registry(manager, suppliers)


def compose_job(overrides: Sequence[str]) -> tuple[Config, Registry]:
    """Composes a config, loads its plugins, and checks the names and options that it gives them.

    Raises:
        ConfigError: see ``rlbatch.config.compose``.
        PluginError: see ``load_plugins`` and ``Registry.complete``.
    """
    config = compose(overrides)
    registry = load_plugins(config.plugins)
    texts = registry.text_options(config)
    if any(typed.lstrip(" +").startswith(tuple(texts)) for typed in overrides):
        config = compose(overrides, texts)
    if folder := module_folder(config.plugins):
        found = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))
        environment = {"PYTHONPATH": found, **config.cluster.environment}
        config = dataclasses.replace(config, cluster=dataclasses.replace(config.cluster, environment=environment))
    return registry.complete(config), registry


def module_folder(plugins: Sequence[str]) -> str:
    """The current folder, if Python finds some of the config's ``plugins`` only because it was started there; else empty."""
    for name in plugins:
        file = getattr(sys.modules.get(name), "__file__", None)
        if file and not name.endswith(".py"):
            depth = len(name.split(".")) - (Path(file).name != "__init__.py")
            if Path(file).parents[depth] == Path.cwd() and os.getcwd() not in sys.path[1:]:
                return here()
    return ""


def _installed() -> Iterator[tuple[ModuleType, Supplier]]:
    """Plugins of installed distributions, the built-ins first."""
    named = cache(lambda found: (found.name, found.version) if found else ("", ""))  # each asked reads all that is said of a distribution
    found = [(*named(point.dist), point) for point in metadata.entry_points(group=ENTRY_POINT_GROUP)]
    if not any(distribution == DISTRIBUTION for distribution, _, _ in found):
        raise PluginError(
            f"plugins: the entry points of {DISTRIBUTION} are not installed, so its own plugins cannot be found. "
            "Run `pip install -e .` in its source folder."
        )
    for distribution, version, point in sorted(found, key=lambda item: (item[0] != DISTRIBUTION, item[0], item[2].name)):
        supplier = Supplier(point.value, distribution, version)
        yield _imported(supplier, point.load), supplier


def _extra(name: str) -> tuple[ModuleType, Supplier]:
    """A plugin named in the config: a python file or a module."""
    path = Path(name).resolve()
    if name.endswith(".py") and not path.is_file():
        raise PluginError(f"plugins=[{name}]: there is no such file ({path}). Correct the path.")
    load = partial(load_plugin_file, path) if name.endswith(".py") else partial(importlib.import_module, name)
    return _imported(Supplier(name), load), Supplier(name)


def _imported(supplier: Supplier, load: Callable[[], ModuleType]) -> ModuleType:
    try:
        with state_kept(f"plugin {supplier.module}"):
            return load()
    except (Exception, SystemExit) as error:  # whatever a plugin raises while it is imported must name the plugin
        if isinstance(error, SystemExit) and type(error) is not SystemExit:  # a signal ends this process: no fault of the plugin
            raise
        origin = f" of {supplier.distribution} {supplier.version}" if supplier.distribution else ""
        said = f"plugin {supplier.module}{origin}: does not import: {error_text(error)}. Correct it, or do without it."
        raise PluginError(said) from error


def _register(manager: pluggy.PluginManager, module: ModuleType, supplier: Supplier) -> None:
    needed = getattr(module, "RLBATCH_API", API_VERSION)
    if not isinstance(needed, int) or needed > API_VERSION:
        raise PluginError(f"plugin {supplier.module}: needs plugin API {needed}, this rlbatch has {API_VERSION}. Upgrade rlbatch.")
    if manager.has_plugin(supplier.module):
        raise PluginError(f"plugins=[{supplier.module}]: is listed twice. Leave one out.")
    try:
        manager.register(module, name=supplier.module)
    except pluggy.PluginValidationError as error:
        raise PluginError(f"plugin {supplier.module}: {error}. See docs/use/plugins.md for each hook's arguments.") from error
    hooks = manager.get_hookcallers(module) or []
    for hook in hooks:
        if not hook.has_spec():
            meant = difflib.get_close_matches(hook.name, _known_hooks(), n=1, cutoff=0)[0]
            raise PluginError(f"plugin {supplier.module}: `{hook.name}` is not a hook. Did you mean `{meant}`?")
    if not hooks:
        raise PluginError(
            f"plugin {supplier.module}: implements no hook. Put `@rlbatch.api.hookimpl` above one of {', '.join(_known_hooks())}."
        )


def _known_hooks() -> list[str]:
    return [name for name, _ in inspect.getmembers(hookspecs, inspect.isfunction) if name.startswith("rlbatch_")]


def _registered(function: Any, hook: str, supplier: Supplier) -> Mapping[str, Any]:
    with foreign_code(f"plugin {supplier.module}", hook):
        names = function()
    if not isinstance(names, Mapping) or not all(isinstance(name, str) and name for name in names):
        raise PluginError(
            f"plugin {supplier.module}: {hook} must return a mapping from names, returned {type(names).__name__}. Correct it."
        )
    return names


def _filters(config: Config) -> list[tuple[str, Mapping[str, Any]]]:
    """The group filters, each with its options."""
    return [(name, config.sampling.filter_options.get(name, {})) for name in config.sampling.filters]


def _completed(table: Table, name: str, options: Mapping[str, Any], key: str = "") -> Mapping[str, Any]:
    if not name:  # a reward that is still to be named
        return options
    parsed = table.named(name, key or table.key).parse(options, key or table.key)
    return cast(Mapping[str, Any], with_paths_there(to_plain(with_absolute_paths(parsed))))
